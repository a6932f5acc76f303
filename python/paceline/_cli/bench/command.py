"""The command: starts worlds of ranks, prints a table of ratios, and gives advice.

A ratio compares two turns of one round, which are seconds apart.  The table has the
median over rounds, with the minimum and the maximum.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

import paceline
from paceline import _cgroup
from paceline._cli.bench import models, steps
from paceline._cli.options import Parser

DESCRIPTION = """\
Measures on this machine, in about two minutes, whole training steps of the plain module
and of torch's and Paceline's DistributedDataParallel, with 2 ranks up to one per core
(or GPU); on GPUs also of paceline.DataParallel.  All train on the same batches and take
turns.  It ends with the wrapper, the number of ranks or replicas and the threads that
were fastest."""
EPILOGUE = """\
Close other programs first: results from a busy machine mean little.  Exit status: 0; 1
if a rank failed; 2 if an argument is wrong."""

_QUICK_MODELS = ("digits", "transformer")
_ROUNDS, _QUICK_ROUNDS = 8, 3
_QUICK_TURN_SECONDS = 0.01
_SECONDS = 60.0
_TIMEOUT_SECONDS = 600.0
_MAX_RANKS = 64  # more are of no use
_MAX_LOAD = 0.5  # of the cores, before anything has begun
_HEADINGS = (
    *("model", "contestant", "ranks x threads"),
    *("ms/step", "samples/s", "x plain", "x torch's"),
)
_LEFT_COLUMNS = 2


@dataclass(frozen=True)
class StepRow:
    """The steps of one contestant on one model."""

    model: str
    contestant: str
    n_parallel: int  # ranks or replicas; 1 for the plain module
    n_threads: int  # of a rank, or of the process that has all replicas
    step_ms: float  # the median over rounds
    samples_per_second: float
    against_plain: list[float]  # for each round; empty if it is not compared
    against_torch: list[float]  # likewise


def main(arguments: Sequence[str], program: str) -> int:
    """Run ``bench`` with its arguments; return the exit status."""
    n_cores = _cgroup.threads_of_each(1)
    options, worlds, device_type = _read(arguments, program, n_cores)
    is_busy = os.getloadavg()[0] > _MAX_LOAD * n_cores
    try:
        rows = _measure(options, worlds, device_type, n_cores)
    except RuntimeError as error:  # a RankError is one
        print(f"{program} bench: {error}", file=sys.stderr)
        return 1
    print(
        "Training steps on the same batches: medians of ratios [least, most], above 1 "
        "is faster"
    )
    print(_as_table([_HEADINGS, *map(_cells, rows)]))
    print(advise(rows, device_type))
    if options.quick:
        print("--quick: do not quote these figures.")
    elif is_busy:
        print("The machine was busy before: close other programs, and measure again.")
    return 0


def _read(
    arguments: Sequence[str], program: str, n_cores: int
) -> tuple[argparse.Namespace, list[int], str]:
    """Return the options, the number of ranks of each world, and the device's type."""
    parser = Parser(f"{program} bench", DESCRIPTION, EPILOGUE)
    known, quick = ",".join(models.BY_NAME), ",".join(_QUICK_MODELS)
    add = parser.add_argument
    add("--models", help=f"default: {known}; with --quick {quick}")
    add(
        "--ranks",
        help="numbers of ranks and replicas, as in 2,4; default: powers of two up to "
        "one per core, or per GPU",
    )
    add("--cpu", action="store_true", help="train on the CPU, even if there are GPUs")
    add(
        "--seconds",
        type=float,
        default=_SECONDS,
        help=f"for the turns of all steps together; default {_SECONDS:g}",
    )
    add("--quick", action="store_true", help="short turns: do not quote the figures")
    options = parser.read(arguments)
    names = options.models
    if names is None:
        names = quick if options.quick else known
    options.models = list(dict.fromkeys(names.split(",")))
    for name in options.models:
        if name not in models.BY_NAME:
            parser.error(f"--models has {name!r}: the models are {known}")
    if not 0 < options.seconds < math.inf:
        parser.error(f"--seconds is {options.seconds:g}: give more than 0")
    n_gpus = 0 if options.cpu else torch.cuda.device_count()
    least, most = (1, n_gpus) if n_gpus else (2, _MAX_RANKS)
    if options.ranks is None:
        most = n_gpus or min(max(n_cores, 2), _MAX_RANKS)
        worlds = {2**i for i in range(1, most.bit_length())} | {most}
    else:
        words = options.ranks.split(",")
        worlds = {int(word) if word.isdecimal() else 0 for word in words}
        if not least <= min(worlds) <= max(worlds) <= most:
            also = ", the number of GPUs; --cpu trains without them" * bool(n_gpus)
            parser.error(
                f"--ranks is {options.ranks!r}: give whole numbers from {least} to "
                f"{most}{also}"
            )
    return options, sorted(worlds), "cuda" if n_gpus else "cpu"


def _measure(
    options: argparse.Namespace, worlds: Sequence[int], device_type: str, n_cores: int
) -> list[StepRow]:
    """Start each world, and return the rows of its results."""
    is_cpu = device_type == "cpu"
    contestants = list(steps.CONTESTANTS)
    if is_cpu:  # replicas on the CPU are not for speed
        contestants.remove(steps.REPLICAS)
    rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
    n_turns = len(worlds) * len(options.models) * len(contestants) * rounds
    plan = steps.Plan(
        options.models,
        contestants,
        n_parts=math.lcm(*worlds),
        n_cores=n_cores,
        rounds=rounds,
        turn_seconds=(
            _QUICK_TURN_SECONDS if options.quick else options.seconds / n_turns
        ),
    )
    rows: list[StepRow] = []
    for n in worlds:
        print(f"{n} ranks on {n_cores} cores ...", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(sys.stderr):  # Gloo of torch 2.8 prints
            results = paceline.launch(
                steps.run,
                n,
                plan,
                backend="gloo" if is_cpu else None,
                timeout=_TIMEOUT_SECONDS,
            )
        rows += rows_of(results, n_cores)
    return rows


def rows_of(
    by_rank: Sequence[Mapping[str, steps.Timed]], n_cores: int
) -> list[StepRow]:
    """Return the rows of what ``steps.run`` returned on the ranks of a world."""
    n_ranks = len(by_rank)
    rows = []
    for model, first in by_rank[0].items():
        of_turns: dict[str, list[float]] = {}
        for name in first.step_ms:
            on_ranks = [rank[model].step_ms.get(name) for rank in by_rank]
            of_turns[name] = [
                fmean(turn) for turn in zip(*filter(None, on_ranks), strict=True)
            ]
        for name in (name for name in steps.CONTESTANTS if name in of_turns):
            step_ms = of_turns[name]
            n_shares = n_ranks if name in steps.ON_ALL_RANKS else 1
            against = {
                other: [a / b for a, b in zip(of_turns[other], step_ms, strict=True)]
                for other in (steps.PLAIN, steps.TORCH)
                if other in of_turns and other != name
            }
            rows.append(
                StepRow(
                    model,
                    name,
                    1 if name == steps.PLAIN else n_ranks,
                    max(n_cores // n_shares, 1),
                    median(step_ms),
                    first.n_samples / median(step_ms) * 1e3,
                    against.get(steps.PLAIN, []),
                    against.get(steps.TORCH, []) if name == steps.RANKS else [],
                )
            )
    return rows


def advise(rows: Sequence[StepRow], device_type: str) -> str:
    """Tell what was fastest over all models; the plain module if no wrapper was."""
    ratios: dict[tuple[str, int, int], list[list[float]]] = {}
    for row in rows:
        if row.contestant in (steps.REPLICAS, steps.RANKS) and row.against_plain:
            key = (row.contestant, row.n_parallel, row.n_threads)
            ratios.setdefault(key, []).append(row.against_plain)
    means = {key: _geometric(map(median, found)) for key, found in ratios.items()}
    best = max(means, key=lambda key: means[key])
    n_models = len({row.model for row in rows})
    over = "this model" if n_models == 1 else f"these {n_models} models"
    mean = "" if n_models == 1 else ", in the geometric mean"
    if means[best] <= 1.0:
        return (
            f"On {over} no wrapper is faster than the plain module (the best of them "
            f"is {means[best]:.2f} times as fast{mean}): train without one here."
        )
    contestant, n, n_threads = best
    what, start = f"{n} replicas", "paceline.DataParallel(model)"
    if contestant == steps.RANKS:
        what, start = f"{n} ranks", f"torchrun --nproc-per-node {n} train.py"
        if device_type == "cpu":
            what += f" of {n_threads} thread{'s' * (n_threads > 1)} each"
            start = f"OMP_NUM_THREADS={n_threads} {start}"
    text = (
        f"On {over} the fastest is {steps.CONTESTANTS[contestant]} with {what}: "
        f"{means[best]:.2f} times as fast as the plain module{mean}.\n{start}"
    )
    least = _geometric(map(min, ratios[best]))
    rivals = [
        f"{steps.CONTESTANTS[key[0]]} with {key[1]}"
        for key, found in ratios.items()
        if key != best and _geometric(map(max, found)) >= least
    ]
    rivals += ["the plain module"] * (least <= 1.0)
    if rivals:
        text += f"\nToo few rounds to tell it from {', '.join(rivals)}: give --seconds."
    return text


def _geometric(values: Iterable[float]) -> float:
    return math.exp(fmean(map(math.log, values)))


def _cells(row: StepRow) -> tuple[str, ...]:
    return (
        row.model,
        steps.CONTESTANTS[row.contestant],
        f"{row.n_parallel} x {row.n_threads}",
        f"{row.step_ms:.2f}",
        f"{row.samples_per_second:,.0f}",
        _spread(row.against_plain),
        _spread(row.against_torch),
    )


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def _as_table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells in columns; all but the first two are aligned right."""
    columns: list[list[str]] = []
    for i, cells in enumerate(zip(*lines, strict=True)):
        width = max(map(len, cells))
        align: Any = str.ljust if i < _LEFT_COLUMNS else str.rjust
        columns.append([align(cell, width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
