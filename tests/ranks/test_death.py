"""If a rank is killed at any moment, every other rank raises at once and cleans up."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._ddp.rendezvous import Meeting
from support.processes import descriptors, leftovers, shared_names, wait_until_gone
from support.ranks import Rendezvous, run_ranks, start_ranks, tell
from torch.utils.data import DataLoader, TensorDataset

PHASES = ("construction", "forward", "backward", "finish", "optimizer")
MOST_STEPS = 3000
NEVER = 3600.0  # the deadline: a rank that waits for it exceeds the run's timeout
WORKER_SECONDS = 15.0  # torch's DataLoader workers check their parent every 5 s


@dataclass(frozen=True)
class Moment:
    """A rank to kill, and when."""

    n_ranks: int
    victim: int
    rendezvous: Rendezvous
    phase: str
    step: int
    delay: float  # seconds after the victim reports the begin of the phase


def draw_moments(n, seed):
    """Draw moments that cover every phase, world size, victim and store."""
    rng = random.Random(seed)
    moments = []
    for i in range(n):
        n_ranks = (2, 3, 4)[i % 3]
        victim = 0 if i % 2 else rng.randrange(1, n_ranks)
        rendezvous = "tcp" if i // 2 % 2 else "file"
        phase = PHASES[i % len(PHASES)]
        longest = 0.04 if phase == "construction" else 0.004
        delay = rng.choice((0.0, rng.uniform(0.0, longest)))
        moments.append(
            Moment(n_ranks, victim, rendezvous, phase, rng.randrange(4), delay)
        )
    return moments


# ---- in the ranks -------------------------------------------------------------------


class Net(torch.nn.Module):
    """Some milliseconds of work per step, with gradients as views and as copies."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 256)
        self.norm = torch.nn.BatchNorm1d(256)
        self.second = torch.nn.Linear(256, 256)
        self.last = torch.nn.Linear(256, 8)

    def forward(self, x):
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.second(hidden)))


class Alarm:
    """Tells the test that the phase begins in which it will kill this rank."""

    def __init__(self, moment, rank):
        self._moment = moment
        self._is_set = rank == moment.victim
        self.step = -1

    def __call__(self, phase):
        moment = self._moment
        if self._is_set and phase == moment.phase:
            if phase != "construction" and self.step != moment.step:
                return
            self._is_set = False
            tell(phase)


def make_loader():
    data = TensorDataset(torch.randn(64, 64), torch.zeros(64, dtype=torch.long))
    return DataLoader(
        data,
        batch_size=16,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )


def start_workers(loader, is_victim):
    """Start the workers, and wait until they have recorded their parent."""
    for _ in loader:
        pass
    if is_victim:
        tell([worker.pid for worker in loader._iterator._workers])


def step_forever(model, loader, alarm):
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


def watch_construction(alarm):
    """Report the begin of the construction once the ranks have met.

    Before that, only the process group knows this rank, and the DataLoader's workers
    keep its connections open for some more seconds.
    """
    exchange = Meeting.exchange

    def exchange_and_tell(self, *args):
        told = exchange(self, *args)
        alarm("construction")
        return told

    Meeting.exchange = exchange_and_tell


def train_until_a_kill(rank, n_ranks, moment):
    loader = make_loader()
    alarm = Alarm(moment, rank)
    before = descriptors()
    # Workers are forked before the world is made, or while it exists.
    if moment.phase == "construction":
        start_workers(loader, rank == moment.victim)
    dist.barrier()
    model = None
    caught = None
    try:
        watch_construction(alarm)
        model = paceline.DistributedDataParallel(Net())
        if moment.phase != "construction":
            start_workers(loader, rank == moment.victim)
        step_forever(model, loader, alarm)
    except RuntimeError as error:
        when = time.monotonic()
        caught = f"{type(error).__name__}: {error}"
        facts = error.rank, error.signal
    assert caught is not None, f"no error in {MOST_STEPS} steps"
    del model, loader
    return when, caught, facts, leftovers(before) + shared_names()


# ---- in the test --------------------------------------------------------------------


def kill_at(moment):
    """Kill a rank and check the others; return its DataLoader's workers."""
    victim = moment.victim
    with start_ranks(
        train_until_a_kill,
        moment.n_ranks,
        moment,
        rendezvous=moment.rendezvous,
        group_timeout=NEVER,
    ) as ranks:
        workers = ranks.hear(victim)
        assert ranks.hear(victim) == moment.phase
        time.sleep(moment.delay)
        killed_at = ranks.kill(victim)
        outcomes = ranks.wait()
        # If a rank dies after its construction, errors always name its process.
        died = f"rank {victim} (process {ranks.pids[victim]}) died"
    assert outcomes[victim].exitcode == -9
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.is_ok, outcome
        when, words, facts, left = outcome.value
        print(f"rank {rank} knew after {when - killed_at:.3f} s")
        named = "" if moment.phase == "construction" else died
        assert words.startswith(f"PeerError: rank {rank}: {named}"), words
        assert f"rank {victim}" in words
        # This process may have reaped the victim before the rank looked.
        assert facts in [(victim, None), (victim, signal.SIGKILL)], words
        assert left == []
    return workers


@pytest.mark.parametrize(
    ("n", "seed"), [(10, 1), pytest.param(200, 2, marks=pytest.mark.hand)]
)
def test_every_rank_learns_of_a_kill_at_any_moment(n, seed):
    workers = []
    for moment in draw_moments(n, seed):
        print(moment)
        workers += kill_at(moment)
    assert wait_until_gone(workers, WORKER_SECONDS) == []


def wrap_unless_dead(rank, n_ranks, victim):
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        paceline.DistributedDataParallel(Net())
    except paceline.PeerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("victim", "rendezvous"), [(2, "file"), (0, "tcp")])
def test_a_rank_that_dies_before_it_wraps_is_named(victim, rendezvous):
    outcomes = run_ranks(
        wrap_unless_dead, 3, victim, rendezvous=rendezvous, group_timeout=NEVER
    )
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert f"rank {victim}" in outcome.value
