"""A rank is killed, at any moment: every other rank says so at once, and cleans up."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Any

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._ddp.rendezvous import Meeting
from support.processes import descriptors, leftovers, shared_names, wait_until_gone
from support.ranks import RanksTimeoutError, Rendezvous, run_ranks, start_ranks, tell
from torch.utils.data import DataLoader, TensorDataset

PHASES = ("construction", "forward", "backward", "finish", "optimizer")
MOST_STEPS = 3000
NEVER = 3600.0  # the deadline: a rank that waits for it outlasts its run
WORKER_SECONDS = 15.0  # torch's DataLoader workers look for their parent each 5 s


@dataclass(frozen=True)
class Moment:
    """When which rank is killed."""

    n_ranks: int
    victim: int
    rendezvous: Rendezvous
    phase: str
    step: int
    delay: float  # seconds after the victim said that the phase begins


def draw_moments(n: int, seed: int) -> list[Moment]:
    """Draw moments that cover every phase, world size, victim and store."""
    rng = random.Random(seed)
    moments = []
    for i in range(n):
        n_ranks = (2, 3, 4)[i % 3]
        victim = 0 if i % 2 else rng.randrange(1, n_ranks)
        rendezvous: Rendezvous = "tcp" if i // 2 % 2 else "file"
        phase = PHASES[i % len(PHASES)]
        longest = 0.04 if phase == "construction" else 0.004
        delay = rng.choice((0.0, rng.uniform(0.0, longest)))
        moments.append(
            Moment(n_ranks, victim, rendezvous, phase, rng.randrange(4), delay)
        )
    return moments


# ---- in the ranks -------------------------------------------------------------------


class Net(torch.nn.Module):
    """Some milliseconds of work a step, with gradients of both policies."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 256)
        self.norm = torch.nn.BatchNorm1d(256)
        self.second = torch.nn.Linear(256, 256)
        self.last = torch.nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.second(hidden)))


class Alarm:
    """Tells the test when the phase begins in which this rank is to be killed."""

    def __init__(self, moment: Moment, rank: int) -> None:
        self._moment = moment
        self._is_set = rank == moment.victim
        self.step = -1

    def __call__(self, phase: str) -> None:
        moment = self._moment
        if self._is_set and phase == moment.phase:
            if phase != "construction" and self.step != moment.step:
                return
            self._is_set = False
            tell(phase)


def make_loader() -> DataLoader[Any]:
    data = TensorDataset(torch.randn(64, 64), torch.zeros(64, dtype=torch.long))
    return DataLoader(
        data,
        batch_size=16,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )


def start_workers(loader: DataLoader[Any], is_victim: bool) -> None:
    """Start the workers, which take until now to note who their parent is."""
    for _ in loader:
        pass
    if is_victim:
        tell([worker.pid for worker in loader._iterator._workers])


def step_forever(model: torch.nn.Module, loader: DataLoader[Any], alarm: Alarm) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    last = next(iter(model.module.parameters()))
    last.register_post_accumulate_grad_hook(lambda _: alarm("finish"))
    model.module.second.register_forward_hook(lambda *_: alarm("forward"))
    optimizer.register_step_pre_hook(lambda *_: alarm("optimizer"))
    while alarm.step < MOST_STEPS:
        for inputs, targets in loader:
            alarm.step += 1
            optimizer.zero_grad()
            output = model(inputs)
            output.register_hook(lambda _: alarm("backward"))
            torch.nn.functional.cross_entropy(output, targets).backward()
            optimizer.step()


def watch_construction(alarm: Alarm) -> None:
    """Have the construction noticed from the moment on when the ranks have met.

    Before, nobody knows this rank but the process group, whose connections the
    DataLoader's workers keep open for some seconds more.
    """
    exchange = Meeting.exchange

    def exchange_and_tell(self: Meeting, *args: Any) -> list[Any]:
        told = exchange(self, *args)
        alarm("construction")
        return told

    Meeting.exchange = exchange_and_tell  # type: ignore[method-assign]


def train_until_a_kill(rank: int, n_ranks: int, moment: Moment) -> dict[str, Any]:
    loader = make_loader()
    alarm = Alarm(moment, rank)
    before = descriptors()
    # Workers are forked before the world is made, or while it stands.
    if moment.phase == "construction":
        start_workers(loader, rank == moment.victim)
    dist.barrier()
    model = None
    caught: Exception | None = None
    try:
        watch_construction(alarm)
        model = paceline.DistributedDataParallel(Net())
        if moment.phase != "construction":
            start_workers(loader, rank == moment.victim)
        step_forever(model, loader, alarm)
    except RuntimeError as error:
        seconds = time.monotonic()
        caught = error.with_traceback(None)
    assert caught is not None, f"no error in {MOST_STEPS} steps"
    kind, words = type(caught).__name__, str(caught)
    del model, loader, caught
    return {
        "at": seconds,
        "kind": kind,
        "words": words,
        "left": leftovers(before),
        "names": shared_names(),
    }


# ---- in the test --------------------------------------------------------------------


def kill_at(moment: Moment) -> tuple[list[float], list[str], list[int]]:
    """Return each survivor's seconds to the error, what is wrong, and the workers."""
    wrong = []
    with start_ranks(
        train_until_a_kill,
        moment.n_ranks,
        moment,
        rendezvous=moment.rendezvous,
        group_timeout=NEVER,
    ) as ranks:
        workers = ranks.hear(moment.victim)
        assert ranks.hear(moment.victim) == moment.phase
        time.sleep(moment.delay)
        killed_at = ranks.kill(moment.victim)
        pid = ranks.pids[moment.victim]
        try:
            outcomes = ranks.wait()
        except RanksTimeoutError as error:
            return [], [f"{moment}: {error}"], workers
    assert outcomes[moment.victim].exitcode == -9
    seconds = []
    for rank, outcome in enumerate(outcomes):
        if rank == moment.victim:
            continue
        value = outcome.value
        if value is None:
            wrong.append(f"rank {rank}: {outcome}")
            continue
        seconds.append(value["at"] - killed_at)
        words = value["words"]
        # A rank that dies after its construction is always named with its process.
        named = f"rank {rank}: rank {moment.victim} (process {pid}) died"
        if moment.phase == "construction":
            named = f"rank {rank}: "
        if value["kind"] != "PeerError" or not words.startswith(named):
            wrong.append(f"rank {rank}: {value['kind']}: {words}")
        elif f"rank {moment.victim}" not in words:
            wrong.append(f"rank {rank} does not name {moment.victim}: {words}")
        if value["left"] or value["names"]:
            wrong.append(f"rank {rank} keeps {value['left']} {value['names']}")
    return seconds, [f"{moment}: {words}" for words in wrong], workers


def kill_at_moments(moments: list[Moment]) -> None:
    wrong: list[str] = []
    workers: list[int] = []
    for moment in moments:
        seconds, faults, pids = kill_at(moment)
        print(moment, "seconds to the error:", [round(s, 3) for s in seconds])
        wrong += faults
        workers += pids
    assert not wrong, "\n".join(wrong)
    assert wait_until_gone(workers, WORKER_SECONDS) == []


def test_every_rank_learns_of_a_kill_at_any_moment() -> None:
    kill_at_moments(draw_moments(12, seed=1))


@pytest.mark.hand
def test_every_rank_learns_of_each_of_200_kills() -> None:
    kill_at_moments(draw_moments(200, seed=2))


def wrap_unless_dead(rank: int, n_ranks: int, victim: int) -> str:
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        paceline.DistributedDataParallel(Net())
    except paceline.PeerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rendezvous", ["file", "tcp"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_before_it_wraps_is_named(
    victim: int, rendezvous: Rendezvous
) -> None:
    outcomes = run_ranks(
        wrap_unless_dead, 3, victim, rendezvous=rendezvous, group_timeout=NEVER
    )
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert f"rank {victim}" in outcome.value
