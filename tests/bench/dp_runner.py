"""Runs the rounds and the measurements of memory, keeps what comes out.

Everything known is written down after each group, so that an interrupted run loses the
group that was running and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import Any

import dp_models
import dp_report
from dp_contestants import FLOOR, PLAIN_1
from dp_players import Player, PlayerError, playing
from paceline._cli.bench import machine

Figures = dict[str, Any]
MEMORY_STEPS = 5


class Bench:
    """One run of the benchmark."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.path = args.out / f"dp-{args.malloc}{'-pin' if args.pin else ''}.json"
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        self.results: Figures = {
            "machine": {**machine.describe(), "environment": machine.environment()},
            "settings": settings,
            "models": {},
            "memory": {},
            "failures": [],
        }
        if args.add and self.path.exists():
            before = json.loads(self.path.read_text())
            self.results = {**self.results, **before}

    def run(self) -> None:
        """Run every task; Ctrl-C ends it early."""
        try:
            if "steps" in self.args.only:
                for group in range(self.args.groups):
                    for model in self.args.models:
                        self.steps(model, f"{model}, group {group + 1}")
            if "memory" in self.args.only:
                for contestant in self.args.contestants:
                    if contestant not in (PLAIN_1, FLOOR):
                        self.memory(contestant)
        except KeyboardInterrupt:
            self.results["failures"].append({"what": "interrupted", "why": ""})

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Say how long it took; a failure is written down and the rest goes on."""
        load, begin = machine.load(), time.monotonic()
        try:
            yield
        except PlayerError as error:
            self.results["failures"].append({"what": what, "why": str(error)})
            print(f"{what}: FAILED\n{error}", file=sys.stderr, flush=True)
        else:
            seconds = time.monotonic() - begin
            words = f"{what}: {seconds:.0f} s, load {load}"
            print(words, file=sys.stderr, flush=True)
        self.write()

    def player(self, contestant: str, model: str, malloc: str) -> Any:
        """Start a contestant's processes, for the time of a block."""
        args = self.args
        return playing(contestant, model, malloc, pin=args.pin, seconds=args.timeout)

    def steps(self, model: str, what: str) -> None:
        """Start everybody, check everybody, and let all take turns."""
        spec = dp_models.BY_NAME[model]
        entry = self.results["models"].setdefault(
            model, {"title": spec.title, "groups": [], "built": {}, "differences": {}}
        )
        order = random.Random(f"{what} {len(entry['groups'])}")
        steps = max(1, spec.steps_per_block // (10 if self.args.quick else 1))
        block = {"settle": 1 + spec.steps_per_block // 10, "n_steps": steps}
        with ExitStack() as stack:
            players: list[Player] = []
            with self.told(f"{what}, {self.args.rounds} rounds"):
                for name in order.sample(
                    self.args.contestants, len(self.args.contestants)
                ):
                    with self.told(f"{what}, {name}: start and check"):
                        player = stack.enter_context(
                            self.player(name, model, self.args.malloc)
                        )
                        self.begin(player, entry)
                        players.append(player)
                for _ in range(self.args.rounds):
                    turn: Figures = {"load": machine.load(), "contestants": {}}
                    for player in order.sample(players, len(players)):
                        ranks = player.ask("block", **block)
                        turn["contestants"][player.name] = over_ranks(ranks)
                    entry["groups"].append(turn)
                    entry["summary"] = dp_report.summarise(entry["groups"])
                for player in players:
                    player.ask("leave")

    def begin(self, player: Player, entry: Figures) -> None:
        """Build and check; what is learned of the start is kept."""
        [built, *_] = player.ask("build")
        entry["n_parameters"] = built.pop("n_parameters")
        entry["n_tensors"] = built.pop("n_tensors")
        entry["built"].setdefault(player.name, []).append(built)
        if player.name == FLOOR:  # its gradients are those of a half
            player.ask("train", n_steps=1)
        else:
            difference = max(rank["difference"] for rank in player.ask("check"))
            worst = entry["differences"].get(player.name, 0.0)
            entry["differences"][player.name] = max(worst, difference)

    def memory(self, contestant: str) -> None:
        """Measure the memory of a contestant, with a small model and a big one.

        malloc does here as it does by default, since it is to give back what is free.
        """
        with self.told(f"memory, {contestant}"):
            found = {}
            for spec in dp_models.SMALL, dp_models.BIG:
                with self.player(contestant, spec.name, "default") as player:
                    [built, *_] = player.ask("build")
                    player.ask("forward")
                    pss = {"forward": player.pss_mib()}
                    player.ask("train", n_steps=MEMORY_STEPS)
                    pss["backward"] = player.pss_mib()
                    player.ask("leave")
                found[spec.name] = {"n_parameters": built["n_parameters"], **pss}
            self.results["memory"][contestant] = found

    def write(self) -> None:
        """Write all that is known; the file is whole at any moment."""
        draft = self.path.with_suffix(".json.part")
        draft.write_text(json.dumps(self.results))
        draft.replace(self.path)


def over_ranks(ranks: list[Figures]) -> Figures:
    """The mean of the ranks' clocks, step by step; the sum of their CPU time."""
    steps = zip(*(rank["step_us"] for rank in ranks), strict=True)
    return {
        "step_us": [round(fmean(times), 1) for times in steps],
        "cpu_us": round(sum(rank["cpu_us"] for rank in ranks), 1),
    }
