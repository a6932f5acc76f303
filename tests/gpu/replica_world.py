"""What a check of DataParallel is given: replicas on the one GPU, in one process.

`device_ids=[0, 0]` is two replicas there, each with memory, a thread and a side stream
of its own: all that several GPUs have but the way between them.  No process group is
made.  A rehearsal has replicas on the CPU, and `--fake` one GPU of fake_gpus.several().
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
from checks import Check, Figures, Skip, is_on_fake, is_rehearsal
from torch import Tensor, nn
from world import be_exact

ENVIRONMENT = (("PACELINE_GPU_WORLD", "replica_world"),)


def in_one_process(checks: list[Check]) -> list[Check]:
    """The checks, for processes that have this world and not that of ranks."""
    return [replace(c, env=(*c.env, *ENVIRONMENT)) for c in checks]


@dataclass
class World:
    """One process and its GPU; `rank` and `size` are those of the only rank."""

    device: torch.device
    rank: int = 0
    size: int = 1
    wrappers: Any = field(default_factory=weakref.WeakSet, repr=False)

    @classmethod
    def join(cls, rank: int, size: int, port: int) -> World:
        """Take the GPU; there is nobody to meet."""
        del rank, size, port
        torch.set_num_threads(1)
        if is_rehearsal():
            return cls(torch.device("cpu"))
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        return cls(device)

    def run(self, check: Check) -> Figures | None:
        """Run one check, with nothing left of the one before."""
        be_exact(getattr(check.function, "is_exact", True))
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
        if not is_on_fake():
            return contextlib.nullcontext()
        from support import fake_gpus

        return fake_gpus.several(1)

    # ---- wrappers -------------------------------------------------------------------

    def wrap(self, module: nn.Module, n: int = 2, **options: Any) -> Any:
        """Wrap a module for n replicas; it comes to the device first."""
        if self.device.type == "cpu" and not is_on_fake():
            options = {"device_ids": ["cpu"] * n, **options}
        else:
            options = {"device_ids": [0] * n, **options}
        model = paceline.DataParallel(module.to(self.device), **options)
        self.wrappers.add(model)
        return model

    def count_calls(self, model: Any) -> collections.Counter[str]:
        """What is asked of the devices from now on, by name; after a first forward."""
        if self.device.type == "cpu" and not is_on_fake():
            raise Skip("replicas on the CPU ask no device")
        recorder = Recorder(model._engine.group.native)
        model._engine.group.native = recorder
        return recorder.counts

    # ---- values ---------------------------------------------------------------------

    def generator(self, seed: int = 0) -> torch.Generator:
        """Random numbers of the CPU, the same in every run."""
        return torch.Generator().manual_seed(1000 * seed)

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """Normal numbers on the device, the same in every run."""
        return torch.randn(shape, generator=self.generator(seed)).to(self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if is_on_fake():
            from support import fake_gpus

            fake_gpus.synchronize()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Recorder:
    """A native group of devices, and how often each of its functions is called."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.counts: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.native, name)

        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            self.counts[name] += 1
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
