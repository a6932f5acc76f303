"""The command: starts worlds of ranks, prints what they measured, and gives advice."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline._cli.bench import all_reduce, machine, plot, report, steps, tables
from paceline._cli.doctor import system

DESCRIPTION = """\
Measures on this machine, in about two minutes: the bare all-reduce against Gloo's, and
whole training steps of the plain module and of torch's and Paceline's
DistributedDataParallel, with 2 ranks up to one a core (or GPU); on GPUs also of
paceline.DataParallel.  All train on the same batches and take turns.  It ends with the
wrapper, the number of ranks or replicas and the threads that were fastest."""
EPILOGUE = """\
Close what else uses the machine: figures of a busy one are worth little.  Exit status:
0; 1 if a rank failed; 2 if an argument is wrong."""

MODELS = ("digits", "transformer", "resnet18", "mlp25m")
_QUICK_MODELS = ("digits", "transformer")
_ROUNDS = 8
# Of fewer ratios than six not even the range is an interval of 95 % for the median.
_QUICK_ROUNDS = 6
_SIZES_BYTES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]
_QUICK_SIZES_BYTES = [64 << 10, 1 << 20]
_QUICK_TURN_SECONDS = 0.01
_SECONDS = 60.0
_BLOCKS = 8
_QUICK_BLOCKS = 6
_TIMEOUT_SECONDS = 600.0
_MAX_RANKS = 64  # for which it is of use
_MAX_LOAD = 0.5  # of the cores, before anything has begun


@dataclass(frozen=True)
class Settings:
    """The command line, read and checked.

    Attributes
    ----------
    models : list of str
    ranks : list of int
        Of each world.
    device_type : str
        ``"cpu"`` or ``"cuda"``.
    n_cores : int
        That may be used.
    seconds : float
        For all turns of steps together.
    is_quick, is_json : bool
    plot : str
        The picture's file, or nothing.
    """

    models: list[str]
    ranks: list[int]
    device_type: str
    n_cores: int
    seconds: float
    is_quick: bool
    is_json: bool
    plot: str

    @property
    def rounds(self) -> int:
        """Turns of each contestant."""
        return _QUICK_ROUNDS if self.is_quick else _ROUNDS

    def plan(self) -> steps.Plan:
        """Return what each world is to measure."""
        contestants = list(steps.CONTESTANTS)
        if self.device_type == "cpu":  # replicas there are not for speed
            contestants.remove(steps.REPLICAS)
        n_turns = len(self.ranks) * len(self.models) * len(contestants) * self.rounds
        return steps.Plan(
            models=self.models,
            contestants=contestants,
            n_parts=math.lcm(*self.ranks),
            n_cores=self.n_cores,
            rounds=self.rounds,
            turn_seconds=(
                _QUICK_TURN_SECONDS if self.is_quick else self.seconds / n_turns
            ),
            is_silent=self.is_json,
        )


def main(arguments: Sequence[str], program: str) -> int:
    """Run ``bench`` with its arguments; return the exit status."""
    settings = _read(arguments, program)
    described = machine.describe()
    if not settings.is_json:
        print(_machine_line(described, settings), file=sys.stderr, flush=True)
    try:
        calls, rows = _measure(settings)
    except RuntimeError as error:  # a RankError is one
        print(f"{program} bench: {error}", file=sys.stderr)
        return 1
    advice = report.advise(rows, settings.device_type)
    doubts = _doubts(described, settings)
    if doubts:
        advice = replace(advice, text=f"{advice.text}\n{doubts}")
    if settings.is_json:
        _show_json(settings, described, calls, rows, advice)
    else:
        _show_text(calls, rows, advice)
    if settings.plot:
        plot.draw(rows, _machine_line(described, settings), settings.plot)
        if not settings.is_json:
            print(f"written: {settings.plot}")
    return 0


def _read(arguments: Sequence[str], program: str) -> Settings:
    parser = argparse.ArgumentParser(
        prog=f"{program} bench",
        description=DESCRIPTION,
        epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--models",
        help=f"with commas; by default all of {', '.join(MODELS)}; with --quick "
        f"{' and '.join(_QUICK_MODELS)}",
    )
    add(
        "--ranks",
        help="numbers of ranks and replicas, with commas, as in 2,4; by default powers "
        "of two up to one a core, or a GPU",
    )
    add("--cpu", action="store_true", help="train on the CPU, also where GPUs are")
    add(
        "--seconds",
        type=float,
        default=_SECONDS,
        help=f"for the turns of all steps together; default {_SECONDS:g}",
    )
    add("--quick", action="store_true", help="short turns: no figures to quote")
    add("--json", action="store_true", help="print one JSON object in place of tables")
    add("--plot", metavar="FILE", default="", help="draw a picture: .png, .svg, .pdf")
    options = parser.parse_args(arguments)
    n_gpus = 0 if options.cpu else torch.cuda.device_count()
    n_cores = max(int(system.look_cores().n_usable), 1)
    if not 0 < options.seconds < math.inf:
        parser.error(f"--seconds is {options.seconds:g}: give more than 0")
    if options.plot and (wrong := _why_no_plot(options.plot)):
        parser.error(f"--plot {options.plot}: {wrong}")
    return Settings(
        models=_read_models(parser, options.models, options.quick),
        ranks=_read_ranks(parser, options.ranks, n_gpus, n_cores),
        device_type="cuda" if n_gpus else "cpu",
        n_cores=n_cores,
        seconds=options.seconds,
        is_quick=options.quick,
        is_json=options.json,
        plot=options.plot,
    )


def _read_models(
    parser: argparse.ArgumentParser, text: str | None, is_quick: bool
) -> list[str]:
    if text is None:
        return list(_QUICK_MODELS if is_quick else MODELS)
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in MODELS:
            known = ", ".join(MODELS)
            parser.error(f"--models has {name!r}: the models are {known}")
    return names


def _read_ranks(
    parser: argparse.ArgumentParser, text: str | None, n_gpus: int, n_cores: int
) -> list[int]:
    if text is None:
        most = n_gpus or min(max(n_cores, 2), _MAX_RANKS)
        powers = [2**i for i in range(1, most.bit_length()) if 2**i <= most]
        return sorted({*powers, most})
    found = set()
    for word in text.split(","):
        least, most = (1, n_gpus) if n_gpus else (2, _MAX_RANKS)
        if not word.isascii() or not word.isdecimal() or not least <= int(word) <= most:
            parser.error(
                f"--ranks has {word!r}: give whole numbers from {least} to {most}"
                + (", the number of GPUs; --cpu trains without them" * bool(n_gpus))
            )
        found.add(int(word))
    return sorted(found)


def _why_no_plot(path: str) -> str:
    """Say why a picture cannot be written, before anything is measured."""
    try:
        formats = plot.formats()
    except ImportError as error:
        return str(error)
    kind = Path(path).suffix[1:].lower()
    if kind not in formats:
        return f"the name must end in one of {', '.join(formats)}"
    folder = Path(path).resolve().parent
    if not os.access(folder, os.W_OK):
        return f"{folder} is no folder that can be written to"
    return ""


def _measure(
    settings: Settings,
) -> tuple[list[report.CallRow], list[report.StepRow]]:
    """Start each world, and make rows of what it returns."""
    plan = settings.plan()
    blocks = _QUICK_BLOCKS if settings.is_quick else _BLOCKS
    sizes = _QUICK_SIZES_BYTES if settings.is_quick else _SIZES_BYTES
    is_cpu = settings.device_type == "cpu"
    calls: list[report.CallRow] = []
    rows: list[report.StepRow] = []
    for n in settings.ranks:
        with contextlib.redirect_stdout(sys.stderr):  # what Gloo of torch 2.8 says
            results = paceline.launch(
                _measure_here,
                n,
                plan,
                sizes if is_cpu else [],
                blocks,
                backend="gloo" if is_cpu else None,
                timeout=_TIMEOUT_SECONDS,
            )
        times_us = results[0][0]
        if times_us:
            calls += report.call_rows(n, times_us, blocks)
        rows += report.step_rows([by_model for _, by_model in results], plan.n_cores)
    return calls, rows


def _measure_here(plan: steps.Plan, sizes_bytes: list[int], blocks: int) -> Any:
    """Be one rank of a world."""
    times_us = {}
    if sizes_bytes:
        torch.set_num_threads(1)
        names = list(all_reduce.MAKERS)
        times_us = all_reduce.time_all_reduce(names, sizes_bytes, blocks)
    return times_us, steps.run(plan)


# ---- output -------------------------------------------------------------------------


def _machine_line(described: dict[str, Any], settings: Settings) -> str:
    device = described["cpu"]
    n = f"{settings.n_cores} cores"
    if settings.device_type == "cuda":
        device = torch.cuda.get_device_name(0)
        n = f"{torch.cuda.device_count()} GPUs"
    return f"{device}, {n}, torch {described['torch']}"


def _doubts(described: dict[str, Any], settings: Settings) -> str:
    """Say why the figures are worth little, where they are."""
    if settings.is_quick:
        return "--quick: these are no figures to quote."
    if described["load_at_start"] > _MAX_LOAD * settings.n_cores:
        return (
            f"The machine was busy before (load {described['load_at_start']}): close "
            "what else runs, and measure again."
        )
    return ""


def _show_text(
    calls: Sequence[report.CallRow],
    rows: Sequence[report.StepRow],
    advice: report.Advice,
) -> None:
    if calls:
        tables.show(
            "All-reduce of float32", report.CALL_HEADINGS, report.call_cells(calls)
        )
    tables.show(
        "Training steps on the same batches: medians of paired ratios [95 % interval], "
        "above 1 is faster",
        report.STEP_HEADINGS,
        report.step_cells(rows),
    )
    print(advice.text)


def _show_json(
    settings: Settings,
    described: dict[str, Any],
    calls: Sequence[report.CallRow],
    rows: Sequence[report.StepRow],
    advice: report.Advice,
) -> None:
    found = {
        "version": paceline.__version__,
        "machine": described,
        "settings": asdict(settings),
        "all_reduce": [asdict(row) for row in calls],
        "steps": [asdict(row) for row in rows],
        "advice": asdict(advice),
    }
    print(json.dumps(found, indent=2))
