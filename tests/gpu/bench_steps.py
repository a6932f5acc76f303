"""Whole steps of contestants that take turns in the same processes.

Each has a separate model with the same seed and inputs, and is used as by a user:
torch's defaults, SGD, zero_grad() in each step.  Each round has a new random order, the
same on all ranks, and ratios are computed within a round.

Host time is the CPU time to enqueue a step on an idle device, without waiting for it.
Step time is the clock's time of a block of steps that ends with a synchronisation.
With 2 ranks on one GPU, NCCL sends by sockets and the kernels of the two processes take
turns.  So their step times say nothing about a real machine, but their host times do.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import bench_models as models
import paceline
import torch
from check_memory import CONTESTANTS
from checks import add, is_fake, is_quick
from stats import Interval, median_with_interval
from torch import Tensor, nn
from world import World, timing

N_BATCHES = 4
WARM_UP = 6
MAX_HOST_US = 0.5  # per parameter
MAX_OF_TORCH = 1 / 3  # of torch DDP's host overhead
MAX_OF_PLAIN = 1.01  # of the plain module's step time, for one rank


def wrap_alone(world: World, module: nn.Module) -> nn.Module:
    """Wrap for one rank as users get it: without a reducer."""
    return paceline.DistributedDataParallel(module.to(world.device))


class Entry:
    def __init__(self, world: World, name: str, spec: models.ModelSpec) -> None:
        self.name, self.spec, self.world = name, spec, world
        torch.manual_seed(1)
        wrap = wrap_alone if name == "paceline_alone" else CONTESTANTS[name]
        self.model = wrap(world, spec.build())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.batches = make_batches(world, spec)
        self.count = 0

    def next_batch(self) -> list[Tensor]:
        self.count += 1
        return self.batches[self.count % N_BATCHES]

    def step(self) -> None:
        x, y = self.next_batch()
        self.optimizer.zero_grad()
        self.spec.loss(self.model(x), y).backward()
        self.optimizer.step()

    def host_step(self) -> list[float]:
        """Return the host's microseconds for forward with loss, backward, the rest."""
        x, y = self.next_batch()
        now = time.perf_counter_ns
        self.world.synchronize()
        begin = now()
        self.optimizer.zero_grad()
        cleared = now()
        loss = self.spec.loss(self.model(x), y)
        lost = now()
        loss.backward()
        back = now()
        self.optimizer.step()
        rest = cleared - begin + now() - back
        return [(lost - cleared) / 1e3, (back - lost) / 1e3, rest / 1e3]

    def block_us(self, n: int) -> float:
        """Return the microseconds per step until the device has done n steps."""
        self.world.synchronize()
        self.world.meet()
        self.step()
        self.world.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(n):
            self.step()
        self.world.synchronize()
        return (time.perf_counter_ns() - begin) / 1e3 / n


def make_batches(world: World, spec: models.ModelSpec) -> list[list[Tensor]]:
    g = world.generator(3)
    rows = [spec.make_batch(g) for _ in range(N_BATCHES)]
    return [[t.to(world.device) for t in row] for row in rows]


def in_turns(entries: list[Entry], n_rounds: int) -> Iterator[list[Entry]]:
    """Yield the contestants in a new order for each round, equal on all ranks."""
    order = random.Random(5)
    for _ in range(n_rounds):
        yield order.sample(entries, len(entries))


def measured(
    entries: list[Entry], n_rounds: int, measure: Callable[[Entry], Any]
) -> dict[str, list[Any]]:
    """Return the measurements of each contestant, a value per round."""
    found: dict[str, list[Any]] = {entry.name: [] for entry in entries}
    for turn in in_turns(entries, n_rounds):
        for entry in turn:
            found[entry.name].append(measure(entry))
    return found


def ratio_of(found: dict[str, list[float]], a: str, b: str) -> Interval:
    pairs = zip(found[a], found[b], strict=True)
    return median_with_interval([x / y for x, y in pairs])


def enter(world: World, names: list[str], spec: models.ModelSpec) -> list[Entry]:
    entries = [Entry(world, name, spec) for name in names]
    for entry in entries:
        for _ in range(WARM_UP):
            entry.step()
    world.synchronize()
    return entries


def rounds(n: int) -> int:
    return 3 if is_quick() or is_fake() else n


def listed(interval: Interval) -> list[float]:
    return [round(x, 4) for x in (interval.median, interval.low, interval.high)]


def host_time(world: World, name: str) -> dict[str, Any]:
    """Measure a step's host time, and its part beyond the plain module's."""
    spec = models.BY_NAME[name]
    entries = enter(world, ["none", "torch", "torch_view", "paceline"], spec)
    n_params = len(list(entries[0].model.parameters()))

    def host_us(entry: Entry) -> list[float]:
        world.meet()
        entry.host_step()
        steps = [entry.host_step() for _ in range(5 if world.size > 1 else 10)]
        return [median(column) for column in zip(*steps, strict=True)]

    found = measured(entries, rounds(15), host_us)
    figures: dict[str, Any] = {"n_parameters": n_params, "rounds": len(found["none"])}
    over: dict[str, list[float]] = {}
    for entry_name, rows in found.items():
        columns = [round(median(c), 1) for c in zip(*rows, strict=True)]
        parts = ("forward", "backward", "rest")
        figures[entry_name] = dict(zip(parts, columns, strict=True))
        pairs = zip(rows, found["none"], strict=True)
        over[entry_name] = [sum(mine) - sum(plain) for mine, plain in pairs]
    lines = []
    for entry_name in ("torch", "torch_view", "paceline"):
        each = median_with_interval([us / n_params for us in over[entry_name]])
        figures[entry_name]["overhead_us_per_parameter"] = listed(each)
        step_us = median(over[entry_name])
        words = (
            f"{entry_name}: overhead of the host {step_us:.0f} us, {each} a parameter"
        )
        lines.append(f"{name}, {n_params} parameters, {world.size} ranks, {words}")
    over["torch"] = [max(us, 1e-3) for us in over["torch"]]
    share = ratio_of(over, "paceline", "torch")
    mine = median(over["paceline"]) / n_params
    good = mine <= MAX_HOST_US and share.median <= MAX_OF_TORCH
    figures["of_torch"], figures["target"] = (
        listed(share),
        "meets" if good else "misses",
    )
    lines.append(f"    of torch's: {share} {figures['target']}")
    return {**figures, "lines": lines}


def step_time(world: World, name: str) -> dict[str, Any]:
    spec = models.BY_NAME[name]
    names = ["none", "torch", "torch_view", "paceline"]
    if world.size == 1:
        names.append("paceline_alone")
    entries = enter(world, names, spec)
    n = spec.steps_per_block if world.size == 1 else 4
    n_rounds = rounds(15 if world.size == 1 else 7)
    times = measured(entries, n_rounds, lambda entry: entry.block_us(n))
    ratio = partial(ratio_of, times)
    figures: dict[str, Any] = {
        "step_us": {k: round(median(v), 1) for k, v in times.items()}
    }
    against = ratio("torch", "paceline")
    figures["torch_over_paceline"] = listed(against)
    figures["paceline_over_none"] = listed(ratio("paceline", "none"))
    figures["torch_over_none"] = listed(ratio("torch", "none"))
    line = f"{name}, {world.size} ranks: torch / paceline {against}, paceline / plain "
    line += str(ratio("paceline", "none"))
    lines = [line]
    if world.size == 1:
        alone = ratio("paceline_alone", "none")
        good = "meets" if alone.median <= MAX_OF_PLAIN else "misses"
        figures["alone_over_none"], figures["target"] = listed(alone), good
        low, high = f"{alone.low:.3f}", f"{alone.high:.3f}"
        lines.append(f"    without a reducer {alone.median:.3f} [{low}, {high}] {good}")
    return {**figures, "lines": lines}


def first_steps(world: World, name: str) -> dict[str, Any]:
    """Measure construction, the first step, the second, and a later one, in ms."""
    spec = models.BY_NAME[name]
    figures: dict[str, Any] = {}
    Entry(world, "none", spec).step()  # initialises cuBLAS and cuDNN
    for contestant in ("none", "torch", "paceline"):
        rows = []
        for _ in range(rounds(4)):
            world.synchronize()
            world.meet()
            marks = [time.perf_counter_ns()]
            entry = Entry(world, contestant, spec)
            world.synchronize()
            marks.append(time.perf_counter_ns())
            for _ in range(6):
                entry.step()
                world.synchronize()
                marks.append(time.perf_counter_ns())
            rows.append([(b - a) / 1e6 for a, b in itertools.pairwise(marks)])
            del entry
        columns = [round(median(c), 3) for c in zip(*rows, strict=True)]
        figures[contestant] = {
            "construction_ms": columns[0],
            "first_ms": columns[1],
            "second_ms": columns[2],
            "sixth_ms": columns[6],
        }
    words = {k: (v["first_ms"], v["sixth_ms"]) for k, v in figures.items()}
    return {
        **figures,
        "lines": [f"{name}, {world.size} ranks, first and 6th ms: {words}"],
    }


def exposed_time(world: World, name: str) -> dict[str, Any]:
    """Measure from the end of backward's own work to the begin of the optimizer.

    The hook on the input's gradient, the last one, records the first event.  The second
    is recorded after backward() on the same stream.
    """
    spec = models.BY_NAME[name]
    entries = enter(world, ["none", "torch", "torch_view", "paceline"], spec)

    def gap_us(entry: Entry) -> float:
        x, y = entry.next_batch()
        x = x.detach().clone().requires_grad_()
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        x.register_hook(lambda grad: begin.record())
        entry.optimizer.zero_grad()
        loss = spec.loss(entry.model(x), y)
        loss.backward()
        end.record()
        entry.optimizer.step()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end)

    def median_gap_us(entry: Entry) -> float:
        world.meet()
        gap_us(entry)
        return median(gap_us(entry) for _ in range(4))

    gaps = measured(entries, rounds(15), median_gap_us)
    figures = {key: round(median(values), 1) for key, values in gaps.items()}
    line = f"{name}, {world.size} ranks: from backward to optimizer, us: {figures}"
    return {"gap_us": figures, "lines": [line]}


def graph_step(world: World, name: str) -> dict[str, Any]:
    """Compare a step replayed as a CUDA graph with that of the plain module."""
    from check_modes import Captured

    spec = models.BY_NAME[name]
    batches = make_batches(world, spec)
    made: dict[str, Any] = {}
    for contestant in ("none", "paceline"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model = CONTESTANTS[contestant](world, spec.build())
            captured = Captured(model, spec, batches[0])
            for _ in range(WARM_UP):
                captured.step()
        torch.cuda.current_stream().wait_stream(side)
        world.synchronize()
        captured.capture()
        made[contestant] = captured
    times: dict[str, list[float]] = {key: [] for key in made}
    for i in range(rounds(15)):
        for key in sorted(made, reverse=bool(i % 2)):
            world.meet()
            world.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(10):
                made[key].graph.replay()
            world.synchronize()
            times[key].append((time.perf_counter_ns() - begin) / 1e4)
    ratio = ratio_of(times, "paceline", "none")
    figures = {key: round(median(values), 1) for key, values in times.items()}
    line = f"{name}, {world.size} ranks, replayed: {figures} us, ratio {ratio}"
    return {"step_us": figures, "of_plain": listed(ratio), "lines": [line]}


ROWS: list[tuple[Callable[..., Any], str, tuple[int, ...]]] = [
    *[(step_time, name, (1, 2)) for name in ("resnet18", "small", "digits")],
    (host_time, "transformer", (1,)),
    (exposed_time, "resnet18", (1,)),
    (first_steps, "resnet18", (1, 2)),
    (host_time, "small", (1, 2)),
    *[(step_time, name, (1, 2)) for name in ("mlp25m", "transformer")],
    (first_steps, "mlp25m", (1,)),
    (exposed_time, "mlp25m", (1, 2)),
    (graph_step, "small", (1,)),
    (graph_step, "transformer", (1,)),
]
for _function, _model, _worlds in ROWS:
    _name = f"{_function.__name__}_{_model}"
    _made = timing(partial(_function, name=_model))
    _options = {"needs_cuda": _function in (exposed_time, graph_step), "seconds": 70}
    add(globals(), _name, _made, worlds=_worlds, **_options)
