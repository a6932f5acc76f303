"""Time whole training steps of contestants that take turns in one world of ranks.

A step is zero_grad(), forward, loss, backward and SGD on one whole batch, the same for
all.  Each rank of DistributedDataParallel takes an equal part of the batch; the plain
module and DataParallel take all of it on rank 0, while the other ranks sleep.  So two
contestants are compared by turns that are seconds apart, under the same load.

Each contestant uses all cores: ranks by an equal share of threads each, the plain
module and CPU replicas, which run one after another, by the threads of their operators.
On GPUs the plain module uses one, the others use one per rank or replica; a turn ends
when the GPU is done.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline._cli.bench import models
from paceline._cli.bench.models import Batch, ModelSpec

PLAIN, REPLICAS, TORCH, RANKS = "plain", "replicas", "torch-ddp", "ranks"
CONTESTANTS = {
    PLAIN: "plain module",
    REPLICAS: "paceline.DataParallel",
    TORCH: "torch's DistributedDataParallel",
    RANKS: "paceline.DistributedDataParallel",
}
ON_ALL_RANKS = (TORCH, RANKS)

_N_BATCHES = 4
_MIN_STEPS = 2  # of a turn
_WARM_UP_STEPS = 3
# Relative to the largest element: the order of sums differs, on GPUs algorithms too.
_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-2}


@dataclass(frozen=True)
class Plan:
    """What a world measures."""

    models: list[str]
    contestants: list[str]
    n_parts: int  # of the whole batch, each as large as the model's own batch
    n_cores: int  # that a contestant uses
    rounds: int  # turns of each contestant
    turn_seconds: float  # approximately


@dataclass
class Timed:
    """One rank's measurements of one model."""

    n_samples: int  # in the whole batch
    # For each contestant that uses this rank: the mean of each turn.
    step_ms: dict[str, list[float]] = field(default_factory=dict)


def run(
    plan: Plan, specs: Mapping[str, ModelSpec] = models.BY_NAME
) -> dict[str, Timed]:
    """Measure all models on this rank, which :func:`paceline.launch` has started."""
    world = paceline.init()
    # A rank that waits for NCCL would keep its GPU busy.
    waiting = dist.new_group(backend="gloo")
    return {
        name: _Turns(plan, specs[name], world, waiting).run() for name in plan.models
    }


class _Contestant:
    """A wrapped model that trains on this rank."""

    def __init__(self, name: str, spec: ModelSpec, world: Any, n_cores: int) -> None:
        self.name, self.spec, self.device = name, spec, world.device
        self.n_threads = n_cores
        torch.set_num_threads(n_cores)
        torch.manual_seed(1)
        module = spec.build().to(world.device)
        self.model = self._wrap(module, world)
        self.optimizer = torch.optim.SGD(self.model.parameters(), models.LEARNING_RATE)

    def _wrap(self, module: nn.Module, world: Any) -> nn.Module:
        if self.name == PLAIN:
            return module
        is_cpu, n = world.device.type == "cpu", world.world_size
        if self.name == REPLICAS:
            return paceline.DataParallel(module, ["cpu"] * n if is_cpu else range(n))
        self.n_threads = max(self.n_threads // n, 1)
        ids = None if is_cpu else [world.device.index]
        if self.name == TORCH:
            return nn.parallel.DistributedDataParallel(module, device_ids=ids)
        return paceline.DistributedDataParallel(module, device_ids=ids)

    def backward(self, batch: Batch) -> None:
        inputs, targets = batch
        self.optimizer.zero_grad()
        self.spec.loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    def turn(self, batches: Sequence[Batch], n_steps: int) -> float:
        """Run a turn of `n_steps` steps; return the milliseconds per step."""
        torch.set_num_threads(self.n_threads)
        self._step(batches[-1])
        self._synchronize()
        begin = time.perf_counter()
        for i in range(n_steps):
            self._step(batches[i % len(batches)])
        self._synchronize()
        return (time.perf_counter() - begin) / n_steps * 1e3

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _step(self, batch: Batch) -> None:
        self.backward(batch)
        self.optimizer.step()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Turns:
    """One model's contestants, in turns."""

    def __init__(self, plan: Plan, spec: ModelSpec, world: Any, waiting: Any) -> None:
        self._plan, self._spec, self._world = plan, spec, world
        self._waiting = waiting
        names = [
            name for name in plan.contestants if world.rank == 0 or name in ON_ALL_RANKS
        ]
        self._contestants = {
            name: _Contestant(name, spec, world, plan.n_cores) for name in names
        }
        generator = torch.Generator().manual_seed(0)
        self._whole = [self._batch(generator) for _ in range(_N_BATCHES)]
        rank, n = world.rank, world.world_size
        self._parts = [
            (x[rank::n].contiguous(), y[rank::n].contiguous()) for x, y in self._whole
        ]

    def run(self) -> Timed:
        timed = Timed(len(self._whole[0][0]))
        if set(ON_ALL_RANKS) <= set(self._plan.contestants):
            self._check()
        n_steps = {name: self._count_steps(name) for name in self._plan.contestants}
        order = random.Random(0)
        for _ in range(self._plan.rounds):
            for name in order.sample(self._plan.contestants, len(n_steps)):
                step_ms = self._turn(name, n_steps[name])
                if step_ms is not None:
                    timed.step_ms.setdefault(name, []).append(step_ms)
        return timed

    def _batch(self, generator: torch.Generator) -> Batch:
        parts = [self._spec.make_batch(generator) for _ in range(self._plan.n_parts)]
        inputs, targets = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
        return inputs.to(self._world.device), targets.to(self._world.device)

    def _batches(self, name: str) -> list[Batch]:
        """Return the batches of a contestant on this rank."""
        return self._parts if name in ON_ALL_RANKS else self._whole

    def _turn(self, name: str, n_steps: int) -> float | None:
        """Run one contestant's turn, on the ranks that it uses."""
        dist.barrier(self._waiting)
        contestant = self._contestants.get(name)
        if contestant is None:
            return None
        return contestant.turn(self._batches(name), n_steps)

    def _count_steps(self, name: str) -> int:
        """Return how many steps a turn has; the same on all ranks."""
        step_ms = self._turn(name, _WARM_UP_STEPS)
        n_steps = 0
        if step_ms is not None:
            n_steps = max(round(self._plan.turn_seconds * 1e3 / step_ms), _MIN_STEPS)
        count = torch.tensor([n_steps], device="cpu")
        dist.broadcast(count, 0, self._waiting)
        return int(count)

    def _check(self) -> None:
        """Raise RuntimeError if our gradients are not those of torch's wrapper."""
        of_both = []
        for name in ON_ALL_RANKS:
            contestant = self._contestants[name]
            torch.set_num_threads(contestant.n_threads)
            contestant.backward(self._batches(name)[0])
            of_both.append(contestant.gradients())
        limit = _TOLERANCE[self._world.device.type]
        for right, ours in zip(*of_both, strict=True):
            scale = right.abs().max().clamp_min(torch.finfo(right.dtype).tiny)
            found = ((ours - right).abs().max() / scale).item()
            if not found <= limit:  # catches a NaN, too
                raise RuntimeError(
                    f"{self._spec.title}: gradients differ from those of torch's "
                    f"wrapper by {found:g} of their largest element, more than "
                    f"{limit:g}: nothing is timed; run `paceline doctor`"
                )
