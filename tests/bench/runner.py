"""Plan the groups of processes, run one after another, keep the results.

The whole plan is made before the first group starts, so that the remaining time can be
estimated.  All results are written after each group: an interrupted run loses only the
group that was running.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import bench_models as models
import machine
import report
import steps
from groups import Figures, Job, prepare_environment, run_group
from paceline import RankError

FIRST_GUESS_SECONDS = 5.0  # for a task that has not run yet: mostly torch's start


@dataclass(frozen=True)
class Planned:
    """A planned set of processes: its job, and the function for its figures."""

    what: str  # for readers
    job: Job
    keep: Callable[[Figures], None]

    @property
    def kind(self) -> tuple[str, str, int, str]:
        """The kind; groups of one kind take equally long."""
        job = self.job
        return job.task.__name__, job.model, len(job.contestants), job.contestants[0]


class Clock:
    """The times of groups of each kind, to estimate the remaining time."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str, int, str], list[float]] = {}

    def add(self, planned: Planned, seconds: float) -> None:
        self.seconds.setdefault(planned.kind, []).append(seconds)

    def guess(self, planned: Planned) -> float:
        """Estimate a group's seconds by its kind, else its task, else a first guess."""
        of_task = [
            seconds
            for kind, each in self.seconds.items()
            for seconds in each
            if kind[0] == planned.kind[0]
        ]
        return fmean(self.seconds.get(planned.kind) or of_task or [FIRST_GUESS_SECONDS])

    def left(self, rest: list[Planned]) -> str:
        seconds = sum(self.guess(planned) for planned in rest)
        if seconds < 90:
            return f"about {seconds:.0f} s left"
        return f"about {seconds / 60:.0f} min left"


class Bench:
    """Runs the tasks, keeps the results, writes them after each group."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        apart = "-apart" if args.apart else ""
        where = f"-{args.hosts}hosts-{args.rate or 'unlimited'}" if args.hosts else ""
        self.path = args.out / f"ddp-{args.ranks}r-{args.malloc}{where}{apart}.json"
        self.namespaces: list[str] = []  # by rank, if there are several hosts
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        self.results: Figures = {
            "machine": {**machine.describe(), "environment": machine.environment()},
            "settings": {**settings, "threads": 1},
            "models": {
                name: {"title": models.BY_NAME[name].title, "groups": [], "memory": {}}
                for name in args.models
            },
            "failures": [],
        }

    def run(self) -> None:
        """Run every task; Ctrl-C ends it early."""
        prepare_environment(self.args.malloc)
        plan, clock = list(self.plan()), Clock()
        for done, planned in enumerate(plan):
            try:
                self.group(planned, plan[done + 1 :], clock)
            except KeyboardInterrupt:
                what = f"interrupted after {done} of {len(plan)} groups"
                self.results["failures"].append({"what": what, "why": ""})
                break

    def plan(self) -> Iterator[Planned]:
        if self.args.apart and "steps" in self.args.only:
            for model in self.args.models:
                yield self.check(model)
        for pair in range(self.args.pairs):
            for model in self.args.models if "steps" in self.args.only else ():
                if self.args.apart:
                    yield from self.steps_apart(model, pair)
                else:
                    yield self.steps(model, pair)
        if "memory" in self.args.only:
            for model in self.args.models:
                for contestant in self.args.contestants:
                    yield self.memory(model, contestant)

    def job(self, task: Any, contestants: list[str], **more: Any) -> Job:
        return Job(
            task=task,
            ranks=self.args.ranks,
            contestants=contestants,
            blocks=self.args.blocks,
            steps_per_block=4 if self.args.quick else 0,
            limit_seconds=self.args.timeout,
            namespaces=self.namespaces,
            **more,
        )

    def steps(self, model: str, pair: int) -> Planned:
        """Plan one group of one model, in which all contestants take turns."""
        entry = self.results["models"][model]

        def keep(figures: Figures) -> None:
            entry["groups"].append(figures)
            entry["summary"] = report.summarise_steps(entry["groups"])

        names = self.args.contestants
        job = self.job(steps.time_in_turns, names, model=model, order_seed=pair)
        return Planned(f"{model}, group {pair + 1}", job, keep)

    def check(self, model: str) -> Planned:
        def keep(figures: Figures) -> None:
            self.results["models"][model]["check"] = figures

        job = self.job(steps.check_alone, self.args.contestants, model=model)
        return Planned(f"{model}, check", job, keep)

    def steps_apart(self, model: str, pair: int) -> Iterator[Planned]:
        """Plan a group of a model: processes for each contestant, in random order.

        Contestants join the group one by one, so that a partial group is usable.
        """
        entry = self.results["models"][model]
        group: Figures = {}

        def keep(figures: Figures) -> None:
            if not group:
                entry["groups"].append(group)
            [(name, alone)] = figures["contestants"].items()
            everyone = {
                **group.get("contestants", {}),
                name: {**alone, "load": figures["load"]},
            }
            highest = max(one["load"] for one in everyone.values())
            group.update(entry["check"])
            group.update(figures, contestants=everyone, load=highest)
            entry["summary"] = report.summarise_steps(entry["groups"])

        order = random.Random(f"{model} {pair}")
        for name in order.sample(self.args.contestants, len(self.args.contestants)):
            job = self.job(steps.time_alone, [name], model=model)
            yield Planned(f"{model}, group {pair + 1}, {name}", job, keep)

    def memory(self, model: str, contestant: str) -> Planned:
        def keep(figures: Figures) -> None:
            self.results["models"][model]["memory"][contestant] = figures

        job = self.job(steps.measure_memory, [contestant], model=model)
        return Planned(f"memory, {model}, {contestant}", job, keep)

    def group(self, planned: Planned, rest: list[Planned], clock: Clock) -> None:
        """Run one group; record a failure and continue with the rest."""
        job, what = planned.job, planned.what
        checked = "check" in self.results["models"][job.model]
        if job.task is steps.time_alone and not checked:
            print(f"{what}: not timed, for it was not checked", file=sys.stderr)
            return
        load, begin = machine.load(), time.monotonic()
        try:
            figures = run_group(job)
        except RankError as error:
            self.results["failures"].append({"what": what, "why": str(error)})
            words = f"{what}: FAILED, {clock.left(rest)}\n{error}"
        else:
            planned.keep({"load": load, **figures})
            seconds = time.monotonic() - begin
            clock.add(planned, seconds)
            words = f"{what}: {seconds:.0f} s, load {load}, {clock.left(rest)}"
        print(words, file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """Write all results; the file is complete at any moment."""
        draft = self.path.with_suffix(".json.part")
        draft.write_text(json.dumps(self.results))
        draft.replace(self.path)
