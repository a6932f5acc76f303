"""Benchmark of data parallelism on CPU: Paceline against torch's DDP over Gloo.

    python tests/bench/bench_ddp.py                  all that is not by hand
    python tests/bench/bench_ddp.py --quick          a minute or two: does it work?
    python tests/bench/bench_ddp.py --models mlp100m --malloc keep
    python tests/bench/bench_ddp.py --ranks 4        more ranks than cores
    python tests/bench/bench_ddp.py --only all_reduce

What is measured, and how
-------------------------
steps       Whole training steps of several contestants that take turns inside the same
            processes; `steps.py` says what makes it fair.  Before anything is timed,
            everyone's gradients are compared with an average made by hand.
memory      PSS of a rank, each contestant alone in processes of its own.
all_reduce  The bare collective by size; see `all_reduce.py`.

A *group* is one set of fresh rank processes (a pair, with two ranks).  Each task is
repeated in `--pairs` groups, and the groups of all models are interleaved, so that a
slow quarter of an hour does not fall on one model alone.  Ratios are taken inside a
group and summarised over groups; see `stats.py`.  Figures of a busy machine are worth
little: the load at the start of each group is part of the output.

No contestant is tuned: each has its defaults, one intra-op thread a rank and the same
environment.  `--malloc keep` changes glibc's thresholds for all alike.

Writes ddp-<ranks>r-<malloc>.json (all raw times too), .txt and .png under --out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contestants
import machine
import models
import report
from groups import GroupError, run_group
from job import Job

TASKS = ["steps", "memory", "all_reduce"]
SIZES_BYTES = [4 << 10 << 2 * i for i in range(8)]  # 4 KiB to 64 MiB
TELLING = ("PACELINE_", "OMP_", "MKL_", "KMP_", "GLIBC_", "MALLOC_", "LD_PRELOAD")


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_default = [spec.name for spec in models.ALL if not spec.by_hand]
    add = parser.add_argument
    add(
        "--models",
        default=",".join(by_default),
        help=f"all, or some of {', '.join(models.BY_NAME)}",
    )
    add("--contestants", help="default: " + ",".join(contestants.BY_NAME))
    add("--only", choices=TASKS, action="append", help="one task; may be repeated")
    add("--ranks", type=int, default=2)
    add("--pairs", type=int, help="groups of processes: default 5, with --quick 1")
    add("--blocks", type=int, help="turns of each contestant in a group: default 8")
    add("--malloc", choices=["default", "keep"], default="default")
    add("--quick", action="store_true", help="few short turns: no figures to quote")
    add("--timeout", type=float, default=300.0, help="seconds that a group may take")
    add("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    args.models = split_names(parser, args.models, models.BY_NAME)
    args.contestants = present_contestants(parser, args.contestants)
    args.only = args.only or TASKS
    args.pairs = args.pairs or (1 if args.quick else 5)
    args.blocks = args.blocks or (2 if args.quick else 8)
    if args.ranks < 2:
        parser.error("--ranks must be at least 2: there is nothing to reduce")
    return args


def split_names(
    parser: argparse.ArgumentParser, text: str, known: dict[str, Any]
) -> list[str]:
    """Split a list with commas; every name must be known."""
    names = list(known) if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"unknown {name!r}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def present_contestants(parser: argparse.ArgumentParser, text: str | None) -> list[str]:
    """Find who takes part: whoever was asked for, else whoever is there."""
    if text is not None:
        names = split_names(parser, text, contestants.BY_NAME)
        for name in names:
            if reason := contestants.why_missing(name):
                parser.error(f"{name}: {reason}")
        return names
    names = []
    for name in contestants.BY_NAME:
        if reason := contestants.why_missing(name):
            print(f"left out: {name}: {reason}", file=sys.stderr)
        else:
            names.append(name)
    return names


class Bench:
    """Runs the tasks, keeps what came out, writes it down after each group."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.path = args.out / f"ddp-{args.ranks}r-{args.malloc}.json"
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        environment = {k: v for k, v in os.environ.items() if k.startswith(TELLING)}
        self.results: dict[str, Any] = {
            "machine": {**machine.describe(), "environment": environment},
            "settings": {**settings, "threads": 1},
            "models": {
                name: {"title": models.BY_NAME[name].title, "groups": [], "memory": {}}
                for name in args.models
            },
            "all_reduce": {"groups": []},
            "failures": [],
        }

    def run(self) -> None:
        """Run every task."""
        for pair in range(self.args.pairs):
            if "steps" in self.args.only:
                for name in self.args.models:
                    self.steps(name, pair)
            if "all_reduce" in self.args.only:
                self.all_reduce(pair)
        if "memory" in self.args.only:
            for name in self.args.models:
                for contestant in self.args.contestants:
                    self.memory(name, contestant)

    def steps(self, model: str, pair: int) -> None:
        """Run one group of one model."""
        job = Job(
            task="steps",
            ranks=self.args.ranks,
            contestants=self.args.contestants,
            model=model,
            blocks=self.args.blocks,
            steps_per_block=4 if self.args.quick else 0,
            order_seed=pair,
            limit_seconds=self.args.timeout,
        )
        entry = self.results["models"][model]

        def keep(figures: dict[str, Any]) -> None:
            entry["groups"].append(figures)
            entry["summary"] = report.summarise_steps(entry["groups"])

        self.group(f"{model}, group {pair + 1}", job, keep)

    def all_reduce(self, pair: int) -> None:
        """Run one group of plain all-reduces."""
        names = ["gloo"]
        if contestants.PACELINE in self.args.contestants:
            names.append(contestants.PACELINE)
        job = Job(
            task="all_reduce",
            ranks=self.args.ranks,
            contestants=names,
            blocks=self.args.blocks,
            sizes_bytes=SIZES_BYTES,
            order_seed=pair,
            limit_seconds=self.args.timeout,
        )
        entry = self.results["all_reduce"]

        def keep(figures: dict[str, Any]) -> None:
            entry["groups"].append(figures)
            entry["summary"] = report.summarise_all_reduce(
                entry["groups"], self.args.ranks
            )

        self.group(f"all_reduce, group {pair + 1}", job, keep)

    def memory(self, model: str, contestant: str) -> None:
        """Measure the memory of one contestant."""
        job = Job(
            task="memory",
            ranks=self.args.ranks,
            contestants=[contestant],
            model=model,
            limit_seconds=self.args.timeout,
        )

        def keep(figures: dict[str, Any]) -> None:
            self.results["models"][model]["memory"][contestant] = figures

        self.group(f"memory, {model}, {contestant}", job, keep)

    def group(
        self, what: str, job: Job, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        """Run one group; a failure is written down and the rest goes on."""
        load, begin = machine.load(), time.monotonic()
        try:
            figures = run_group(job, self.args.malloc)
        except GroupError as error:
            self.results["failures"].append({"what": what, "why": str(error)})
            print(f"{what}: FAILED\n{error}", file=sys.stderr, flush=True)
        else:
            keep({"load": load, **figures})
            seconds = time.monotonic() - begin
            print(f"{what}: {seconds:.0f} s, load {load}", file=sys.stderr, flush=True)
        self.path.write_text(json.dumps(self.results))


def main() -> None:
    """Run, print, and exit with 1 when a group failed."""
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    try:
        bench.run()
    except KeyboardInterrupt:
        bench.results["failures"].append({"what": "interrupted", "why": ""})
    text = report.as_text(bench.results)
    print(text)
    bench.path.write_text(json.dumps(bench.results))
    bench.path.with_suffix(".txt").write_text(text)
    report.plot(bench.results, bench.path.with_suffix(".png"))
    print(f"written: {bench.path} and .txt, .png")
    sys.exit(bool(bench.results["failures"]))


if __name__ == "__main__":
    main()
