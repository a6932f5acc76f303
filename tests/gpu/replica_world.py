"""What a check of DataParallel is given: replicas on the one GPU, in one process.

`device_ids=[0, 0]` is two replicas there, each with memory, a thread and a side stream
of its own: all that several GPUs have but the way between them.  No process group is
made.  `--fake` has one GPU of fake_gpus.several().
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
    """The checks, for processes that have this world and not that of ranks."""
    return [replace(c, env=(*c.env, *ENVIRONMENT)) for c in checks]


@dataclass
class World(world.World):
    """One process and its GPU: the only rank."""

    wrappers: Any = field(default_factory=weakref.WeakSet, repr=False)

    @classmethod
    def join(cls, rank: int, size: int, port: int) -> World:
        """Take the GPU; there is nobody to meet."""
        del port
        device = world.take_device()
        if is_fake():
            devices = simulated().devices
            devices.load()
            devices.show(1)
            device = torch.device(devices.KIND, 0)
        return cls(rank, size, device, None)

    def run(self, check: Check) -> Figures | None:
        """Run one check, with nothing left of the one before."""
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
        """Wrap a module for n replicas; it comes to the device first."""
        options = {"device_ids": [0] * n, **options}
        model = paceline.DataParallel(module.to(self.device), **options)
        self.wrappers.add(model)
        return model

    def count_native(self, model: Any) -> collections.Counter[str]:
        """What is asked of the devices from now on, by name; after a first forward."""
        recorder = Recorder(model._engine.group.native)
        model._engine.group.native = recorder
        return recorder.counts

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """Normal numbers on the device, the same in every run."""
        return torch.randn(shape, generator=self.generator(seed)).to(self.device)


class Recorder:
    """A native group of devices, and how often each of its functions is called.

    A broadcast of what differs alone counts as a refresh.
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
    """The plain module on each replica's rows, one after the other, outputs joined.

    Buffers that a forward writes are replica 0's; the others have copies.
    """

    def __init__(self, module: nn.Module, n: int) -> None:
        super().__init__()
        self.module, self.n = module, n

    def forward(self, x: Tensor) -> Tensor:
        """The outputs for all rows."""
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
    """What torch's allocator has given, but for the workspaces of libraries."""
    gc.collect()
    torch.cuda.synchronize()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    return torch.cuda.memory_allocated()
