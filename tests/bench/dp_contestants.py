"""Who is compared with DataParallel on CPU.

Each contestant is a way to wrap a module, how many ranks its user has to start, and how
many intra-op threads each of these has.  A rank of DDP gets its share of the batch; all
others get the whole batch, as users give it to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from contestants import why_not_in_paceline, wrap_paceline, wrap_torch
from torch import Tensor, nn

N_REPLICAS = 2


@dataclass(frozen=True)
class Contestant:
    """A name for tables, a line for readers, the way to wrap a module."""

    name: str
    what: str
    wrap: Callable[[nn.Module], nn.Module]
    ranks: int = 1
    threads: int | None = 1  # intra-op, as the user sets them; None: left alone
    parts: int = N_REPLICAS  # into which it divides a batch
    needs: str | None = None  # in paceline


class Before(torch.autograd.Function):
    """Stands for the remote replica's backward: it only has to be in the graph."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        """Make something for `After` to hang on."""
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        """Add nothing to any gradient."""
        nothing: tuple[None, ...] = (None,) * len(ctx.needs_input_grad)
        return nothing


class After(torch.autograd.Function):
    """Stands for the remote replica's output, which is there at once."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, ready: Tensor) -> Tensor:
        """Hand out the output."""
        ctx.save_for_backward(handle)
        return ready.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        """Hand on to `Before`."""
        (handle,) = ctx.saved_tensors
        return handle, None


class Floor(nn.Module):
    """What any wrapper pays that cuts the remote replica out of the graph.

    The first replica's share goes through the plain module, between two autograd nodes
    that do nothing, and is joined with an output that is ready and costs nothing.  The
    gradients are those of that share alone.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.inputs = list(module.parameters())
        self.ready: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Run the first share of the batch."""
        handle: Tensor = Before.apply(*self.inputs)  # type: ignore[no-untyped-call]
        ours = self.module(x[: len(x) // N_REPLICAS])
        if self.ready is None:
            self.ready = torch.zeros_like(ours)
        theirs = After.apply(handle, self.ready)  # type: ignore[no-untyped-call]
        return torch.cat([ours, theirs])


def data_parallel(engine: str) -> Callable[[nn.Module], nn.Module]:
    """Wrap in Paceline's DataParallel with two replicas on the CPU."""

    def wrap(module: nn.Module) -> nn.Module:
        import paceline

        wrapped: nn.Module = paceline.DataParallel(
            module, device_ids=["cpu"] * N_REPLICAS, engine=engine
        )
        return wrapped

    return wrap


PLAIN, PLAIN_1, FLOOR = "plain", "plain-1", "floor"
TORCH_DDP, PACELINE_DDP = "torch-ddp", "pl-ddp"
PROCESS, THREAD = "process", "thread"
ALL = [
    Contestant(
        PLAIN, "the module, all intra-op threads", lambda m: m, threads=None, parts=1
    ),
    Contestant(PLAIN_1, "the module, one intra-op thread", lambda m: m, parts=1),
    Contestant(TORCH_DDP, "torch's DDP over Gloo", wrap_torch, ranks=N_REPLICAS),
    Contestant(
        PACELINE_DDP,
        "Paceline's DDP",
        wrap_paceline,
        ranks=N_REPLICAS,
        needs="DistributedDataParallel",
    ),
    Contestant(
        PROCESS,
        "Paceline's DataParallel, engine='process'",
        data_parallel("process"),
        threads=None,
        needs="DataParallel",
    ),
    Contestant(
        THREAD,
        "Paceline's DataParallel, engine='thread'",
        data_parallel("thread"),
        threads=None,
        needs="DataParallel",
    ),
    Contestant(FLOOR, "half of the work between two idle autograd nodes", Floor),
]
BY_NAME = {contestant.name: contestant for contestant in ALL}


def why_missing(name: str) -> str | None:
    """Say why a contestant cannot take part, or None if it can."""
    needs = BY_NAME[name].needs
    return why_not_in_paceline(needs) if needs else None
