"""The argument of a check on ranks: its rank, and both ways to wrap a module.

In a world of one rank, a wrapper needs no reducer and acts as the plain module.  Here
it gets one, so that all work of a GPU is done.  `plain` wraps without a reducer.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import paceline
import torch
import torch.distributed as dist
from checks import Check, Figures, is_fake, simulated
from paceline._ddp.session import Session
from torch import Tensor, nn

GROUP_SECONDS = 90


_needs_reducer: Any = Session.needs_reducer.fget


class Reducing(paceline.DistributedDataParallel):
    """Also reduces in a world of one rank."""


Session.needs_reducer = property(  # type: ignore[method-assign]
    lambda session: isinstance(session.wrapper, Reducing) or _needs_reducer(session)
)


@dataclass
class World:
    rank: int
    size: int
    device: torch.device
    words: Any = field(repr=False)  # a Gloo group, for messages outside of timings

    @classmethod
    def join(cls, rank: int, size: int, port: int) -> World:
        """Make the default group: NCCL on the GPU, as users do."""
        device = take_device()
        if is_fake():
            simulated().stand_in(rank)
        limit = datetime.timedelta(seconds=GROUP_SECONDS)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=limit,
        )
        words = dist.new_group(backend="gloo", timeout=limit)
        return cls(rank, size, device, words)

    def run(self, check: Check) -> Figures | None:
        """Run one check, after removing the state of the previous one."""
        be_exact(getattr(check.function, "is_exact", True))
        torch.manual_seed(0)
        if not check.dying:
            self.meet()
        figures = check.function(self)
        self.synchronize()
        gc.collect()
        if is_fake():
            found = simulated().errors()
            assert not found, f"simulated CUDA has found misuses: {found}"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return figures

    # ---- wrappers -------------------------------------------------------------------

    def ours(
        self, module: nn.Module, **options: Any
    ) -> paceline.DistributedDataParallel:
        """Move a module to the device and wrap it."""
        model = Reducing(module.to(self.device), **options)
        assert model._session.reducer is not None
        return model

    def theirs(self, module: nn.Module, **options: Any) -> nn.Module:
        wrapped = nn.parallel.DistributedDataParallel(module.to(self.device), **options)
        assert not isinstance(wrapped, paceline.DistributedDataParallel)
        return wrapped

    def taken(self) -> int:
        """Return the used bytes of the GPU, or the live objects of a simulated one."""
        if is_fake():
            return int(simulated().fake().fake_live_objects())
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def count_calls(self, *names: str) -> list[int]:
        """Return the calls of functions of simulated CUDA; [] on a real GPU."""
        if not is_fake():
            return []
        return [simulated().fake().fake_count(name.encode()) for name in names]

    # ---- values ---------------------------------------------------------------------

    def generator(self, seed: int = 0) -> torch.Generator:
        """Return a generator of this rank's random numbers, equal in every run."""
        return torch.Generator().manual_seed(1000 * seed + self.rank)

    def integers(self, *shape: int, seed: int = 0, high: int = 5) -> Tensor:
        """Return small integers, different on each rank: sums of them are exact."""
        g = self.generator(seed)
        return (
            torch.randint(-high, high + 1, shape, generator=g).float().to(self.device)
        )

    def mean(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Return the mean over ranks by hand, on the CPU; None counts as zeros."""
        return self.means([tensor], [like])[0]

    def means(
        self, tensors: Sequence[Tensor | None], likes: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the mean of each tensor, with a single exchange between ranks."""
        mine = [
            torch.zeros_like(like) if t is None else t.detach()
            for t, like in zip(tensors, likes, strict=True)
        ]
        found = []
        for like, *rows in zip(mine, *self.all([t.cpu() for t in mine]), strict=True):
            wide = torch.complex128 if like.is_complex() else torch.float64
            mean = torch.stack([row.to(wide) for row in rows]).mean(0)
            found.append(mean.to(like.dtype).to(like.device))
        return found

    # ---- the others -----------------------------------------------------------------

    def all(self, value: Any) -> list[Any]:
        rows: list[Any] = [None] * self.size
        dist.all_gather_object(rows, value, group=self.words)
        return rows

    def meet(self) -> None:
        self.all(None)

    def synchronize(self) -> None:
        if is_fake():
            simulated().synchronize()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def take_device() -> torch.device:
    """Return this process's GPU; tensors of simulated ones are on the CPU."""
    torch.set_num_threads(1)
    if is_fake():
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def be_exact(on: bool) -> None:
    """Have torch use deterministic kernels and full fp32 precision."""
    torch.use_deterministic_algorithms(on, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = on
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    for name in ("flash", "mem_efficient", "cudnn"):
        enable: Callable[[bool], None] | None = getattr(
            torch.backends.cuda, f"enable_{name}_sdp", None
        )
        if enable is not None:
            enable(not on)


def timing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a check's function that measures: it runs with torch's defaults."""
    function.is_exact = False  # type: ignore[attr-defined]
    return function
