"""The cost of replicas: host time and memory of several replicas on one GPU.

Two replicas on one GPU are not faster than one: the device does the same work in more
and smaller kernels.  So two replicas are compared with the plain module on each half of
the batch in turn, which enqueues the same kernels.  They are also compared with torch's
class with the same GPU twice, which copies and sums nothing, as its replicas share the
parameters there.  One replica is compared with torch's class with one GPU.
Turns alternate, and ratios are those of consecutive turns.

Host time is the CPU time to enqueue work on an idle device, without waiting for it.  A
step by the clock ends with a synchronisation.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import bench_models as models
import torch
from bench_steps import listed, rounds
from checks import add, is_fake, rehearsed
from replica_world import World, allocated
from stats import median_with_interval
from torch import Tensor, nn
from torch.nn import functional as F
from world import timing

MIB = 2**20
WARM_UP = 4
N_ROUNDS = 7
N_CALLS = 5  # per turn; their median counts


class Transformer(nn.Module):
    """Twelve layers of an encoder, without dropout, and scores of their mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of each sequence."""
        scores: Tensor = self.head(self.layers(x).mean(1))
        return scores


class Halves(nn.Module):
    """Runs the plain module on one half of the batch and then on the other."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for all rows."""
        return torch.cat([self.module(part) for part in x.tensor_split(2)])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[int, ...]]]] = {
    "mlp": (lambda: models.build_mlp(64, 416, 416, 10), lambda: (64, 64)),
    "resnet18": (
        lambda: models.build_resnet18(rehearsed(64, 8)),
        lambda: (rehearsed(64, 8), 3, 32, 32),
    ),
    "transformer12": (
        lambda: Transformer(rehearsed(512, 32)),
        lambda: (16, rehearsed(64, 8), rehearsed(512, 32)),
    ),
}


class Entry:
    """A contestant with a separate model, with parameters equal to all others'."""

    def __init__(self, world: World, model: nn.Module, shape: tuple[int, ...]) -> None:
        self.world, self.model = world, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.x = world.normal(*shape)
        self.y = torch.randint(10, shape[:1], generator=world.generator(1))
        self.y = self.y.to(world.device)
        self.output: Any = None

    def call(self) -> None:
        """Run a forward in training mode."""
        self.output = self.model(self.x)

    def evaluation(self) -> None:
        """Run a forward that records no graph, with unchanged parameters."""
        with torch.no_grad():
            self.output = self.model(self.x)

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def host_us(self, function: Callable[[], None]) -> float:
        """Return the host's microseconds for a call, with an idle device."""
        times = []
        for _ in range(N_CALLS):
            self.output = None
            self.world.synchronize()
            begin = time.perf_counter_ns()
            function()
            times.append((time.perf_counter_ns() - begin) / 1e3)
        return median(times)

    def clock_us(self, function: Callable[[], None]) -> float:
        """Return the microseconds per call until the device has done all calls."""
        self.world.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(N_CALLS):
            function()
        self.world.synchronize()
        return (time.perf_counter_ns() - begin) / 1e3 / N_CALLS


def enter(world: World, name: str) -> dict[str, Entry]:
    build, shape = MODELS[name]
    torch.manual_seed(1)
    module = build().to(world.device)
    wrapped = {
        "halves": Halves(copy.deepcopy(module)),
        "two": world.wrap(copy.deepcopy(module), 2),
        "torch": module if is_fake() else nn.DataParallel(copy.deepcopy(module), [0]),
        "one": world.wrap(copy.deepcopy(module), 1),
    }
    if not is_fake():
        wrapped["torch_two"] = nn.DataParallel(copy.deepcopy(module), [0, 0])
    entries = {key: Entry(world, model, shape()) for key, model in wrapped.items()}
    for entry in entries.values():
        for _ in range(WARM_UP):
            entry.step()
    return entries


PAIRS = {
    "two_over_halves": ("two", "halves"),
    "one_over_torch": ("one", "torch"),
    "two_over_torch": ("two", "torch_two"),
}


def replica_time(world: World, name: str) -> dict[str, Any]:
    """Compare ours with the other of each pair: a call, an evaluation, a step."""
    entries = enter(world, name)
    figures: dict[str, Any] = {}
    lines = []
    kinds = (
        *("host_call", "host_evaluation", "host_step"),
        *("clock_evaluation", "clock_step"),
    )
    for kind in kinds:
        measure, _, what = kind.partition("_")
        for pair, names in PAIRS.items():
            if not entries.keys() >= set(names):
                continue
            for each in names:
                entries[each].model.train(what != "evaluation")
            times: dict[str, list[float]] = {each: [] for each in names}
            for number in range(1 + rounds(N_ROUNDS)):
                for each in names if number % 2 else reversed(names):
                    entry = entries[each]
                    taken = entry.host_us if measure == "host" else entry.clock_us
                    us = taken(getattr(entry, what))
                    if number:  # the first turn is a warm-up
                        times[each].append(us)
            rows = zip(times[names[0]], times[names[1]], strict=True)
            ratio = median_with_interval([ours / theirs for ours, theirs in rows])
            us_of = {each: round(median(times[each]), 1) for each in names}
            figures[f"{kind}_{pair}"] = {"us": us_of, "ratio": listed(ratio)}
            over = f"{names[0]} / {names[1]}"
            lines.append(
                f"{name}, {kind.replace('_', ' ')}: {over} {ratio}, us {us_of}"
            )
    n_parameters = len(list(entries["one"].model.parameters()))
    return {"n_parameters": n_parameters, **figures, "lines": lines}


def replica_memory(world: World, name: str) -> dict[str, Any]:
    """Return the memory of torch's allocator between steps, per further replica."""
    build, shape = MODELS[name]
    held = []
    n_bytes = 0
    for n in (1, 2, 3):
        before = allocated()
        torch.manual_seed(1)
        entry = Entry(world, world.wrap(build(), n), shape())
        for _ in range(WARM_UP):
            entry.step()
        entry.optimizer.zero_grad()
        held.append((allocated() - before) / MIB)
        n_bytes = sum(p.nbytes for p in entry.model.parameters())
        n_bytes += sum(b.nbytes for b in entry.model.buffers())
        del entry
    model = n_bytes / MIB
    second, third = held[1] - held[0], held[2] - held[1]
    line = (
        f"{name}: the model has {model:.1f} MiB; a second replica holds {second:.1f}, "
        f"a third {third:.1f}"
    )
    return {
        "model_mib": round(model, 2),
        "held_mib": [round(mib, 2) for mib in held],
        "third_over_model": round(third / model, 3),
        "lines": [line],
    }


for _model in MODELS:
    for _function in (replica_time, replica_memory):
        _name = f"{_function.__name__}_{_model}"
        _made = timing(partial(_function, name=_model))
        _options = {"needs_cuda": _function is replica_memory, "seconds": 70}
        add(globals(), _name, _made, worlds=(1,), **_options)
