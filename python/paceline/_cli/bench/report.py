"""Makes ratios of the turns, lines for tables, and the advice.

A ratio is formed of two turns of one round, which are seconds apart; its median over
rounds is given with a bootstrap interval of 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from paceline._cli.bench import all_reduce, steps
from paceline._cli.bench.stats import Interval, median_with_interval

_GLOO, _PACELINE = "gloo", "paceline"


@dataclass(frozen=True)
class CallRow:
    """The bare all-reduce of one size among so many ranks."""

    n_ranks: int
    n_bytes: int
    gloo_us: float
    paceline_us: float
    times_as_fast: Interval


@dataclass(frozen=True)
class StepRow:
    """The steps of one contestant on one model.

    Attributes
    ----------
    n_parallel : int
        Ranks or replicas; 1 for the plain module.
    n_threads : int
        Of each.
    step_ms : float
        The median over rounds.
    samples_per_second : float
    against_plain, against_torch : Interval or None
        How many times as fast it is.
    """

    model: str
    contestant: str
    n_parallel: int
    n_threads: int
    step_ms: float
    samples_per_second: float
    against_plain: Interval | None = None
    against_torch: Interval | None = None


def call_rows(
    n_ranks: int, times_us: Mapping[str, Mapping[str, Sequence[float]]], blocks: int
) -> list[CallRow]:
    """Make rows of what ``all_reduce.time_all_reduce`` returned on a rank."""
    rows = []
    for size in times_us[_GLOO]:
        of_turns = {}
        for name, by_size in times_us.items():
            n_calls = len(by_size[size]) // blocks
            of_turns[name] = [
                median(by_size[size][i * n_calls : (i + 1) * n_calls])
                for i in range(blocks)
            ]
        gloo, ours = of_turns[_GLOO], of_turns[_PACELINE]
        rows.append(
            CallRow(n_ranks, int(size), median(gloo), median(ours), _ratio(gloo, ours))
        )
    return rows


def step_rows(
    by_rank: Sequence[Mapping[str, Mapping[str, Any]]], n_cores: int
) -> list[StepRow]:
    """Make rows of what ``steps.run`` returned on the ranks of a world."""
    n_ranks = len(by_rank)
    rows = []
    for model, first in by_rank[0].items():
        of_turns = {}
        for name in (n for n in steps.CONTESTANTS if n in first["step_ms"]):
            on_ranks = [rank[model]["step_ms"].get(name) for rank in by_rank]
            of_turns[name] = [
                fmean(turn) for turn in zip(*filter(None, on_ranks), strict=True)
            ]
        for name, step_ms in of_turns.items():
            n_parallel = 1 if name == steps.PLAIN else n_ranks
            against = {
                other: _ratio(of_turns[other], step_ms)
                for other in (steps.PLAIN, steps.TORCH)
                if other in of_turns and other != name
            }
            rows.append(
                StepRow(
                    model,
                    name,
                    n_parallel,
                    _n_threads(name, n_parallel, n_cores),
                    median(step_ms),
                    first["n_samples"] / median(step_ms) * 1e3,
                    against.get(steps.PLAIN),
                    against.get(steps.TORCH) if name == steps.RANKS else None,
                )
            )
    return rows


def _n_threads(contestant: str, n_parallel: int, n_cores: int) -> int:
    """Return the threads of a rank, or of the process that has all replicas."""
    if contestant in steps.ON_ALL_RANKS:
        return max(n_cores // n_parallel, 1)
    return n_cores


def _ratio(slower: Sequence[float], faster: Sequence[float]) -> Interval:
    return median_with_interval([a / b for a, b in zip(slower, faster, strict=True)])


# ---- advice -------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """What to take on this machine.

    Attributes
    ----------
    contestant : str
        A name of ``steps.CONTESTANTS``: ours, or the plain module.
    n_parallel, n_threads : int
        Ranks or replicas, and threads of each.
    times_as_fast : float
        As the plain module: the geometric mean over the models.
    text : str
        All of it in words, and how to start it.
    """

    contestant: str
    n_parallel: int
    n_threads: int
    times_as_fast: float
    text: str


def advise(rows: Sequence[StepRow], device_type: str) -> Advice:
    """Choose what was fastest over all models; the plain module where nothing was."""
    ratios: dict[tuple[str, int, int], list[Interval]] = {}
    for row in rows:
        if row.contestant in (steps.REPLICAS, steps.RANKS) and row.against_plain:
            key = (row.contestant, row.n_parallel, row.n_threads)
            ratios.setdefault(key, []).append(row.against_plain)
    n_cores = max(row.n_threads for row in rows)
    plain = (steps.PLAIN, 1, n_cores)
    means = {key: _geometric(i.median for i in found) for key, found in ratios.items()}
    best = max(means, key=lambda key: means[key], default=plain)
    ratio = means.get(best, 1.0)
    if ratio <= 1.0:
        best = plain
    text = _words(best, ratio, len({row.model for row in rows}), device_type)
    ratios[plain] = [Interval(1.0, 1.0, 1.0)]
    low = _geometric(i.low for i in ratios[best])
    rivals = [
        _name_choice(key)
        for key, found in ratios.items()
        if key != best and _geometric(i.high for i in found) >= low
    ]
    if rivals:
        text += (
            f"\nToo few rounds to tell it from {', '.join(rivals)}: measure longer, by "
            "--seconds."
        )
    return Advice(*best, max(ratio, 1.0), text)


def _name_choice(key: tuple[str, int, int]) -> str:
    """Return what a wrapper is called, with the number of its ranks or replicas."""
    contestant, n, _ = key
    name = steps.CONTESTANTS[contestant]
    return f"the {name}" if contestant == steps.PLAIN else f"{name} with {n}"


def _geometric(values: Any) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def _words(
    best: tuple[str, int, int], ratio: float, n_models: int, device_type: str
) -> str:
    contestant, n, n_threads = best
    over = "this model" if n_models == 1 else f"these {n_models} models"
    threads = _counted(n_threads, "thread")
    mean = "" if n_models == 1 else ", in the geometric mean"
    if contestant == steps.PLAIN:
        where = f"with {threads}" if device_type == "cpu" else "on one GPU"
        return (
            f"On {over} no wrapper is faster than the plain module (the best of them "
            f"is {ratio:.2f} times as fast{mean}): train without one here, {where}."
        )
    name = steps.CONTESTANTS[contestant]
    if contestant == steps.RANKS:
        what = f"{n} ranks" + (f" of {threads} each" if device_type == "cpu" else "")
        start = f"torchrun --nproc-per-node {n} train.py"
        if device_type == "cpu":
            start = f"OMP_NUM_THREADS={n_threads} {start}"
    else:
        what, start = f"{n} replicas", "paceline.DataParallel(model)"
    return (
        f"On {over} the fastest is {name} with {what}: {ratio:.2f} times as fast as "
        f"the plain module{mean}.\n{start}"
    )


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


# ---- tables -------------------------------------------------------------------------

CALL_HEADINGS = ("ranks", "size", "Gloo", "Paceline", "times as fast")
STEP_HEADINGS = (
    "model",
    "contestant",
    "ranks x threads",
    "ms/step",
    "samples/s",
    "x plain",
    "x torch's",
)


def call_cells(rows: Sequence[CallRow]) -> list[tuple[str, ...]]:
    """Return the lines of the table of all-reduces."""
    return [
        (
            str(row.n_ranks),
            _size(row.n_bytes),
            f"{row.gloo_us:,.0f} us",
            f"{row.paceline_us:,.0f} us",
            str(row.times_as_fast),
        )
        for row in rows
    ]


def step_cells(rows: Sequence[StepRow]) -> list[tuple[str, ...]]:
    """Return the lines of the table of steps."""
    return [
        (
            row.model,
            steps.CONTESTANTS[row.contestant],
            f"{row.n_parallel} x {row.n_threads}",
            f"{row.step_ms:.2f}",
            f"{row.samples_per_second:,.0f}",
            str(row.against_plain or ""),
            str(row.against_torch or ""),
        )
        for row in rows
    ]


def _size(n_bytes: int) -> str:
    kib, mib = n_bytes / 2**10, n_bytes / 2**20
    return f"{mib:g} MiB" if mib >= 1 else f"{kib:g} KiB"


assert {_GLOO, _PACELINE} == set(all_reduce.MAKERS)
