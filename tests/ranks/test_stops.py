"""Ranks that are slow, stopped, interrupted, or finish before the others."""

import signal
import time
from pathlib import Path

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._ddp import rendezvous
from support.hosts import Hosts
from support.processes import is_asleep
from support.ranks import start_ranks, tell, values
from support.waiting import until

DEADLINE = 1.5
SLACK_SECONDS = 20.0  # for a loaded machine
ENV = {"PACELINE_TIMEOUT": str(DEADLINE)}


def make_model():
    layers = [torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128)]
    return paceline.DistributedDataParallel(torch.nn.Sequential(*layers))


def step(model):
    model(torch.randn(8, 32)).sum().backward()


def end_of(body):
    """Run `body`; return its error's type and message, and the time; tell the test."""
    kind = words = ""
    try:
        body()
    except (KeyboardInterrupt, paceline.PeerError) as error:
        kind, words = type(error).__name__, str(error)
    when = time.monotonic()
    tell("ended")
    return kind, words, when


def train_until_told(rank, n_ranks, file):
    """Train until a file exists; all ranks take the same number of steps."""
    model = make_model()
    group = dist.new_group()
    n_steps = 0

    def train():
        nonlocal n_steps
        is_over = torch.zeros(1)
        while not is_over.item():
            step(model)
            n_steps += 1
            if n_steps == 1:
                tell("running")
            if file.name == "agreed":
                is_over[0] = float(rank == 0 and file.exists())
                dist.all_reduce(is_over, group=group)

    return end_of(train), n_steps


def hear_all(ranks, but=-1):
    for rank in range(len(ranks.pids)):
        if rank != but:
            ranks.hear(rank)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_at_the_deadline(victim):
    with start_ranks(train_until_told, 3, Path("never"), env=ENV) as ranks:
        hear_all(ranks)
        stopped_at = ranks.signal(victim, signal.SIGSTOP)
        hear_all(ranks, but=victim)
        ranks.signal(victim, signal.SIGCONT)
        outcomes = values(ranks.wait())
    for rank, ((kind, words, when), _) in enumerate(outcomes):
        assert kind == "PeerTimeoutError"
        if rank == victim:  # it accuses nobody
            assert f"rank {rank}: this rank kept the others waiting beyond" in words
        else:
            assert DEADLINE - 0.1 < when - stopped_at < DEADLINE + SLACK_SECONDS
            assert words.startswith(f"rank {rank}: rank {victim} (process ")
            assert "lives but kept the others waiting beyond the deadline" in words


def test_a_short_stop_is_waited_for(tmp_path):
    file = tmp_path / "agreed"
    with start_ranks(train_until_told, 2, file, env=ENV) as ranks:
        hear_all(ranks)
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(0.6 * DEADLINE)
        ranks.signal(1, signal.SIGCONT)
        file.touch()
        (first, n_first), (second, n_second) = values(ranks.wait())
    assert first[:2] == second[:2] == ("", "")
    assert n_first == n_second


def wait_for_an_interrupt(rank, n_ranks, file):
    model = make_model()
    step(model)
    if rank != 0:
        assert until(file.exists)
    tell("about to wait")
    return end_of(lambda: step(model))


def test_an_interrupt_ends_a_wait_before_the_other_rank_comes(tmp_path):
    file = tmp_path / "interrupted"
    with start_ranks(
        wait_for_an_interrupt, 2, file, group_timeout=20.0, timeout=60.0
    ) as ranks:
        assert ranks.hear(0) == "about to wait"
        until(lambda: is_asleep(ranks.pids[0]), 5.0)  # on a busy machine it may poll
        begin = ranks.signal(0, signal.SIGINT)
        assert ranks.hear(0) == "ended"
        file.touch()
        first, second = (outcome.value for outcome in ranks.wait())
    assert first[0] == "KeyboardInterrupt"
    assert first[2] - begin < 4.0, "it waited for the group's deadline"
    assert second[0] == "PeerError"
    assert "rank 0" in second[1]


# ---- suspended jobs -----------------------------------------------------------------

SUSPENDED_SECONDS = 2.0 * DEADLINE
N_STEPS = 4


def train_past_a_pause(rank, n_ranks, hosts, where, folder):
    """Train; once, half of the ranks compute until the test resumes them."""

    def pause():
        tell("there")
        if rank >= n_ranks // 2:
            assert until((folder / "resumed").exists)

    hosts.join(rank, f"{folder}/store", 60.0)
    if where == "construction":
        make_world = rendezvous.Meeting._make_world

        def pause_and_make_world(*args, **kwargs):
            pause()
            return make_world(*args, **kwargs)

        rendezvous.Meeting._make_world = pause_and_make_world
    model = paceline.DistributedDataParallel(torch.nn.Linear(4, 3, bias=False))
    means = []
    for n in range(N_STEPS):
        if n == 2 and where == "a step":
            pause()
        model.zero_grad()
        model(torch.full((1, 4), float(rank + n))).sum().backward()
        means.append(model.module.weight.grad.unique().tolist())
    return means


SUSPENDED = [  # where, the ranks of each host, and the order in which ranks go on
    ("a step", (2,), 1),
    ("a step", (1, 1), -1),
    ("a step", (2, 2), 1),
    ("construction", (2,), -1),
    ("construction", (1, 1), 1),
]
OTHERS = [
    pytest.param(where, n_ranks, -order, marks=pytest.mark.long)
    for where, n_ranks, order in SUSPENDED
]


@pytest.mark.parametrize(("where", "n_ranks", "order"), SUSPENDED + OTHERS)
def test_a_job_that_was_suspended_beyond_the_deadline_goes_on(
    where, n_ranks, order, tmp_path
):
    hosts = Hosts(n_ranks)
    n = hosts.world_size
    with start_ranks(
        train_past_a_pause, n, hosts, where, tmp_path, rendezvous="none", env=ENV
    ) as ranks:
        hear_all(ranks)
        time.sleep(0.3)  # the others wait for these by now
        for rank in range(n):
            ranks.signal(rank, signal.SIGSTOP)
        time.sleep(SUSPENDED_SECONDS)
        (tmp_path / "resumed").touch()
        for rank in range(n)[::order]:
            ranks.signal(rank, signal.SIGCONT)
            time.sleep(0.1)
        found = values(ranks.wait())
    assert found == [[[step + (n - 1) / 2] for step in range(N_STEPS)]] * n
