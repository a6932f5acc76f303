"""The argument of a check of DataParallel: replicas on one GPU, in one process.

`device_ids=[0, 0]` makes two replicas there, each with its own memory, thread and side
stream, like several GPUs, but without a link between GPUs.  There is no process group.
`--fake` uses one GPU of fake_gpus.several().
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import paceline
import torch
import world
from checks import Check, Figures, is_fake, simulated
from torch import Tensor, nn

ENVIRONMENT = (("PACELINE_GPU_WORLD", "replica_world"),)


def in_one_process(checks: list[Check]) -> list[Check]:
    """Return the checks, set to run in this world instead of one of ranks."""
    return [replace(c, env=(*c.env, *ENVIRONMENT)) for c in checks]


@dataclass
class World(world.World):
    """One process and its GPU: the only rank."""

    wrappers: Any = field(default_factory=weakref.WeakSet, repr=False)

    @classmethod
    def join(cls, rank: int, size: int, port: int) -> World:
        """Take the GPU; there are no other ranks to meet."""
        del port
        device = world.take_device()
        if is_fake():
            devices = simulated().devices
            devices.load()
            devices.show(1)
            device = torch.device(devices.KIND, 0)
        return cls(rank, size, device, None)

    def run(self, check: Check) -> Figures | None:
        """Run one check, after removing the state of the previous one."""
        world.be_exact(getattr(check.function, "is_exact", True))
        with self._gpus():
            try:
                torch.manual_seed(0)
                figures = check.function(self)
                self.synchronize()
            finally:
                for wrapper in list(self.wrappers):
                    wrapper._engine = None  # a failure's traceback holds the wrapper
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return figures

    def _gpus(self) -> contextlib.AbstractContextManager[Any]:
        if not is_fake():
            return contextlib.nullcontext()
        return simulated().several(1)

    # ---- wrappers -------------------------------------------------------------------

    def wrap(self, module: nn.Module, n: int = 2, **options: Any) -> Any:
        """Move a module to the device and wrap it for n replicas."""
        options = {"device_ids": [0] * n, **options}
        model = paceline.DataParallel(module.to(self.device), **options)
        self.wrappers.add(model)
        return model

    def count_native(self, model: Any) -> collections.Counter[str]:
        """Count native calls by name from now on; call it after a first forward."""
        recorder = Recorder(model._engine.group.native)
        model._engine.group.native = recorder
        return recorder.counts

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """Return normal numbers on the device, the same in every run."""
        return torch.randn(shape, generator=self.generator(seed)).to(self.device)


class Recorder:
    """A native group of devices that counts the calls of each of its functions.

    A broadcast that sends only differences counts as a refresh.
    """

    def __init__(self, native: Any) -> None:
        self.native = native
        self.counts: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.native, name)

        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            is_refresh = name == "broadcast" and args[-1] is not None
            self.counts["refresh" if is_refresh else name] += 1
            return function(*args)

        return counted


class ByHand(nn.Module):
    """Runs the plain module on each replica's rows in turn, and joins the outputs.

    A forward of replica 0 writes the module's buffers; the others write copies.
    """

    def __init__(self, module: nn.Module, n: int) -> None:
        super().__init__()
        self.module, self.n = module, n

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for all rows."""
        parts = x.tensor_split(self.n)
        outputs = [self.module(parts[0])]
        kept = dict(self.module.named_buffers()) if self.module.training else {}
        for part in parts[1:]:
            if kept:
                own = copy.deepcopy(kept)
                given = {**dict(self.module.named_parameters()), **own}
                outputs.append(torch.func.functional_call(self.module, given, (part,)))
            else:
                outputs.append(self.module(part))
        return torch.cat(outputs)


def allocated() -> int:
    """Return the memory of torch's allocator, without libraries' workspaces."""
    gc.collect()
    torch.cuda.synchronize()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    return torch.cuda.memory_allocated()
