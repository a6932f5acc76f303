"""Hosts that vanish: without power, or cut off.  Nobody sees a connection end.

The process group's timeout is much longer than these tests, so only the probes of the
links between hosts notice in time.
"""

import contextlib
import os
import signal
import time

import paceline
import pytest
import torch
from support import fake_gpus
from support.hosts import make_network
from support.ranks import start_ranks, tell, values
from support.waiting import until

N_RANKS = (2, 2)
GROUP_SECONDS = 80.0
LIMIT_SECONDS = 2.0
FOREVER = 10**9


def train(
    rank, _, hosts, folder, limit, n_steps, computes=False, on_gpu=False, width=4
):
    """Train; return all means, or the error that ended it and its time."""
    if limit is not None:
        os.environ["PACELINE_LINK_TIMEOUT"] = str(limit)
    hosts.join(rank, f"{folder}/store", GROUP_SECONDS)
    means = []
    with fake_gpus.on_gpu(rank) if on_gpu else contextlib.nullcontext():
        model = paceline.DistributedDataParallel(
            torch.nn.Linear(width, width, bias=False)
        )
        try:
            for step in range(n_steps):
                if step == 3:
                    tell("there")
                    assert not computes or until((folder / "computed").exists)
                model.zero_grad()
                x = torch.full((1, width), float(rank + step % 7))
                model(x).sum().backward()
                means = [*means[-300:], model.module.weight.grad.unique().tolist()]
                time.sleep(0.02)
        except paceline.PeerError as error:
            return time.monotonic(), type(error).__name__, str(error)
    return means


def act_on_hosts(folder, act, *args, env=None):
    """Train on two hosts, and act on the network or on the ranks meanwhile."""
    network, hosts = make_network(N_RANKS)
    with (
        contextlib.closing(network),
        start_ranks(
            train,
            hosts.world_size,
            *(hosts, folder, *args),
            rendezvous="none",
            timeout=GROUP_SECONDS,
            env=env,
        ) as ranks,
    ):
        for rank in range(hosts.world_size):
            assert ranks.hear(rank) == "there"
        act(network, ranks)
        (folder / "computed").touch()
        return values(ranks.wait())


VANISH = [
    ("cut", False, False),
    ("unplug", True, False),
    ("cut", False, True),
    pytest.param("cut", True, False, marks=pytest.mark.long),
    pytest.param("turn_off", False, False, marks=pytest.mark.long),
    pytest.param("mute", False, False, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("how", "computes", "on_gpu"), VANISH)
def test_a_host_that_vanishes_is_named_long_before_the_deadline(
    how, computes, on_gpu, tmp_path
):
    def vanish(network, _):
        getattr(network, how)(1)
        if computes:  # all ranks do, beyond the limit
            time.sleep(2.0 * LIMIT_SECONDS)

    env = fake_gpus.environment() if on_gpu else None
    args = LIMIT_SECONDS, FOREVER, computes, on_gpu
    found = act_on_hosts(tmp_path, vanish, *args, env=env)
    for rank, (_, kind, text) in enumerate(found):
        assert kind == "PeerError", text
        host = "ranks 2 to 3 (host 1)" if rank < 2 else "ranks 0 to 1 (host 0)"
        assert f"{host} did not answer for 2 s: the host is down, or the" in text


def cut_for(network, _, seconds):
    network.cut(1)
    time.sleep(seconds)
    network.mend(1)


def stop_for(_, ranks, seconds):
    """Stop the first rank of a host: its kernel answers, and its buffers fill."""
    ranks.signal(2, signal.SIGSTOP)
    time.sleep(seconds)
    ranks.signal(2, signal.SIGCONT)


@pytest.mark.parametrize(
    ("act", "seconds", "limit", "width"),
    [
        (cut_for, 2.0, 12.0, 4),
        pytest.param(cut_for, 4.0, None, 4, marks=pytest.mark.long),
        (stop_for, 2.0 * LIMIT_SECONDS, LIMIT_SECONDS, 1000),
        pytest.param(stop_for, 15.0, None, 1000, marks=pytest.mark.long),
    ],
)
def test_a_short_cut_heals_and_a_stopped_rank_is_waited_for(
    act, seconds, limit, width, tmp_path
):
    n_steps, n_ranks = 20, sum(N_RANKS)

    def act_on(network, ranks):
        act(network, ranks, seconds)

    args = limit, n_steps, False, False, width
    found = act_on_hosts(tmp_path, act_on, *args)
    right = [[step % 7 + (n_ranks - 1) / 2] for step in range(n_steps)]
    assert found == [right] * n_ranks
