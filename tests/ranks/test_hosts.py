"""Ranks on several hosts train as on one, and raise if a peer fails.

FUZZ=100 draws 100 failures, and FUZZ_SEED=7 begins with that of seed 7.
"""

import contextlib
import logging
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import paceline
import pytest
import torch
import torch.distributed as dist
from host_cases import (
    NOTICED_SECONDS,
    assert_trained,
    fail,
    fail_in_turn,
    fail_on,
    failing,
    run_on_hosts,
    start_on_hosts,
    steps,
    steps_of_both,
)
from paceline._ddp import group_comm, host_links, open_files, rendezvous
from support.hosts import Hosts, Net, make_network
from support.ranks import values
from support.threads import in_threads
from torch import nn

CUT_SECONDS = 8.0  # long enough to make a wrapper on a loaded machine
SEED = int(os.environ.get("FUZZ_SEED", "1"))
DRAWN = range(SEED, SEED + int(os.environ.get("FUZZ", "4")))


def train(rank, hosts):
    def refuse(*_):
        raise AssertionError("the process group carries something")

    group_comm.GroupComm.issue = refuse
    torch.manual_seed(rank)
    return steps_of_both(paceline.DistributedDataParallel(Net()), rank)


def share_a_backward(rank):
    torch.manual_seed(0)
    one, two = (paceline.DistributedDataParallel(nn.Linear(2000, 500)) for _ in "ab")
    for _ in range(3):
        x = torch.full((2, 2000), 0.01 * (rank + 1))
        losses = [one(x).square().mean(), two(x).square().mean()]
        sum(losses).backward()
    return [p.grad.clone() for p in (*one.parameters(), *two.parameters())]


def train_in_all_ways(rank, hosts):
    with pytest.raises(paceline.MismatchError):
        paceline.DistributedDataParallel(nn.Linear(3, 5 + (rank == 1)))
    failed = steps_of_both(fail_in_turn(rank, hosts), rank)
    return failed, share_a_backward(rank), train(rank, hosts)


@pytest.mark.parametrize("n_ranks", [(1, 1), (2, 2), (1, 2), (1, 1, 1), (2, 1, 1)])
def test_ranks_of_several_hosts_train_as_with_torch_and_after_failures(n_ranks, store):
    found = run_on_hosts(train_in_all_ways, Hosts(n_ranks), store)
    failed, shared, trained = zip(*found, strict=True)
    assert all(all(map(torch.equal, shared[0], other)) for other in shared)
    assert_trained(list(failed))
    assert_trained(list(trained))


# ---- resources that hosts may lack --------------------------------------------------


def lack_links(rank, hosts, lack):
    logging.basicConfig(level=logging.WARNING)
    listen = host_links.LinkListener.__init__
    if lack == "unencrypted words":
        os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
    elif lack == "a listener" and rank == 1:
        host_links.LinkListener.__init__ = fail
    elif lack == "descriptors" and rank == hosts.world_size - 1:
        open_files.make_room = fail
    elif lack == "a way":
        rendezvous.LINK_SECONDS = 2.0
        if rank == 0:
            host_links.LinkListener.__init__ = lambda self, _: offer_another_port(
                self, listen
            )
    model = paceline.DistributedDataParallel(Net())
    return model._session.world.uses_group, steps_of_both(model, rank)


def offer_another_port(listener, listen):
    listen(listener)
    listener.offer = host_links.Offer((("127.0.0.1", 9),))


@pytest.mark.parametrize(
    ("device", "n_ranks", "lack", "words"),
    [
        ("cpu", (1, 1), "a listener", "rank 1: no port is free"),
        ("cpu", (1, 2), "a listener", "rank 1: no port is free"),
        ("cpu", (1, 2), "descriptors", "rank 2: no port is free"),
        ("cpu", (1, 1), "a way", "host 0 cannot be reached at 127.0.0.1 port 9"),
        ("cpu", (1, 1), "unencrypted words", ""),
        ("gpu", (1, 1), "a listener", "rank 1: no port is free"),
        ("gpu", (1, 1), "unencrypted words", ""),
    ],
)
def test_hosts_without_links_train_by_the_group(device, n_ranks, lack, words, store):
    with start_on_hosts(
        lack_links, Hosts(n_ranks), store, lack, device=device
    ) as ranks:
        outcomes = ranks.wait()
    use_the_group, trained = zip(*values(outcomes), strict=True)
    assert all(use_the_group)
    assert_trained(list(trained))
    assert ("process group's own collectives" in outcomes[0].output) == bool(words)
    assert words in outcomes[0].output


# ---- failures -----------------------------------------------------------------------

# The device, how a rank fails, which one, and the number of ranks on each host.
FAILURES = [
    *(("cpu", "kill", *row) for row in [(1, (1, 1)), (3, (2, 2)), (2, (1, 1, 1))]),
    *(("cpu", how, 3, (2, 2)) for how in ("raise", "backward", "fewer")),
    *(("cpu", how, 2, (1, 1, 1)) for how in ("backward", "fewer")),
    *(("gpu", "kill", *row) for row in [(1, (1, 1)), (2, (2, 2)), (3, (2, 2))]),
    *(("gpu", how, 3, (2, 2)) for how in ("kill a parent", "raise")),
    *(("gpu", how, 2, (2, 2)) for how in ("kill a parent", "fewer")),
    *(("gpu", "kill", 0, (3,)), ("gpu", "fewer", 1, (2,))),
]


@pytest.mark.parametrize(("device", "how", "culprit", "n_ranks"), FAILURES)
def test_a_rank_that_fails_is_named_on_every_host(device, how, culprit, n_ranks, store):
    hosts = Hosts(n_ranks)
    began, outcomes, pids = fail_on(hosts, how, culprit, store, device=device)
    first = sum(n_ranks[: hosts.host_of(culprit)])
    names = f"rank {culprit}", f"rank {first}", f"ranks {first} to {first + 1} (host 1)"
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            assert how != "kill" or outcome.exitcode == -signal.SIGKILL
            continue
        assert outcome.is_ok, outcome
        kind, when, text = outcome.value
        assert kind == "PeerError", text
        assert any(name in text for name in names), text
        fault = paceline.PeerError(text).rank
        is_lost = culprit == first and how != "backward" and rank // 2 != culprit // 2
        assert fault == (None if is_lost and n_ranks == (2, 2) else culprit), text
        assert how != "backward" or "no port is free" in text
        if how == "kill" and len(n_ranks) == 1:
            died = f"rank {culprit} (process {pids[culprit]}) died"
            assert text.startswith(f"rank {rank}: {died}")
        assert when - began < NOTICED_SECONDS


def stop_the_second(ranks):
    ranks.signal(1, signal.SIGSTOP)
    assert ranks.hear(0) == "told"
    ranks.signal(1, signal.SIGCONT)


def test_a_rank_that_is_stopped_is_named_at_the_deadline(store):
    began, outcomes, _ = fail_on(
        Hosts((1, 1)), "stop", 1, store, stop_the_second, seconds=CUT_SECONDS
    )
    kind, when, text = outcomes[0].value
    assert kind == "PeerTimeoutError", text
    assert "rank 1 (host 1) kept this rank waiting" in text
    assert when - began > CUT_SECONDS - 0.5


class Step:
    """A backward called from C without Python code around it; C drops its exception."""

    def __init__(self, loss):
        self.loss = loss

    @property
    def gradients(self):
        torch.autograd.Variable._execution_engine.run_backward(
            (self.loss,), (torch.tensor(1.0),), False, False, (), True, True
        )


def fail_unseen(rank, hosts, how, known):
    model = paceline.DistributedDataParallel(Net())
    loss = model(torch.ones(4, 20), True).sum()
    if rank == 0:
        with pytest.raises(paceline.PeerError) as error:
            loss.backward()
        Path(known).touch()
        return str(error.value)

    def run():
        assert not hasattr(Step(loss), "gradients")
        until = time.monotonic() + NOTICED_SECONDS
        while not os.path.exists(known) and time.monotonic() < until:
            time.sleep(0.01)  # while no other exception is handled

    model.module.norm.weight.register_hook(lack_an_attribute)
    if how == "in a thread":
        in_threads(lambda _: run(), 1)
    else:
        run()
    return Path(known).exists()


def lack_an_attribute(*_):
    raise AttributeError


@pytest.mark.parametrize("how", ["in a thread", "in the main thread"])
def test_an_exception_that_is_never_seen_is_told_other_hosts(how, store):
    known = f"{store}-known"
    text, is_known = run_on_hosts(fail_unseen, Hosts((1, 1)), store, how, known)
    assert is_known
    assert "rank 1 (host 1)" in text
    assert "an exception in its backward" in text


def wrap_anew(rank, _):
    model = paceline.DistributedDataParallel(Net())
    loss = model(torch.ones(4, 20), True).sum()
    with (
        failing(model) if rank == 1 else contextlib.nullcontext(),
        pytest.raises((RuntimeError, OSError)),
    ):
        loss.backward()
    module = model.module
    del model, loss
    dist.barrier()
    return steps(paceline.DistributedDataParallel(module), rank)


def fail_while_others_wait_for_buffers(rank, _):
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Net())
    x = torch.full((4, 20), 0.1 * rank)
    model(x, True).square().mean().backward()
    if rank == 2:
        time.sleep(0.5)  # rank 0 waits in its forward; rank 1 is in its backward
    with (
        failing(model) if rank == 1 else contextlib.nullcontext(),
        pytest.raises(OSError if rank == 1 else paceline.PeerError, match="no port"),
    ):
        model(x, True).square().mean().backward()
    with model.no_sync():
        model(x, True).square().mean().backward()
    model(x, True).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("body", "n_ranks"),
    [(wrap_anew, (1, 2)), (fail_while_others_wait_for_buffers, (2, 1))],
)
def test_a_step_that_failed_is_left_behind_by_a_new_wrapper_and_by_accumulation(
    body, n_ranks, store
):
    first, *others = run_on_hosts(body, Hosts(n_ranks), store)
    for other in others:  # each rank has its own buffers
        pairs = zip(first, other, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if a.dim() > 1)


# ---- namespaces ---------------------------------------------------------------------


@pytest.fixture
def two_hosts():
    network, hosts = make_network((2, 2))
    yield network, hosts
    network.close()


def test_ranks_in_namespaces_train_over_a_slow_lossy_network(two_hosts, store):
    network, hosts = two_hosts
    try:
        network.limit("tbf", "rate", "100mbit", "burst", "16k", "latency", "1ms")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"links cannot be slowed: {error.stderr.strip()}")
    assert_trained(run_on_hosts(train, hosts, store))


KINDS = ("kill a rank", "kill a host", "stop", "cut")
LAYOUTS = [(1, 1), (2, 2), (2, 1), (1, 1, 1), (2, 1, 2)]


@pytest.mark.long
@pytest.mark.parametrize("seed", DRAWN)
def test_a_failure_that_is_drawn_is_named_on_every_host_in_time(seed, store):
    draw, failure = random.Random(seed), KINDS[seed % len(KINDS)]
    network, hosts = make_network(draw.choice(LAYOUTS))
    culprit = draw.randrange(hosts.world_size)
    host = hosts.host_of(culprit)
    of_host = {r for r in range(hosts.world_size) if hosts.host_of(r) == host}
    gone = {"kill a host": of_host, "cut": set()}.get(failure, {culprit})

    def act(ranks):
        time.sleep(draw.uniform(0.0, 0.3))
        if failure == "cut":
            network.cut(host)
        for rank in gone:
            ranks.signal(rank, signal.SIGSTOP if failure == "stop" else signal.SIGKILL)
        if failure == "stop":
            time.sleep(2 * CUT_SECONDS)
            ranks.signal(culprit, signal.SIGCONT)

    with contextlib.closing(network):
        began, outcomes, _ = fail_on(
            hosts, "drawn", culprit, store, act, seconds=CUT_SECONDS
        )
    longest = NOTICED_SECONDS + (0.0 if "kill" in failure else CUT_SECONDS)
    for rank in set(range(hosts.world_size)) - gone:
        kind, when, text = outcomes[rank].value
        assert kind in ("PeerError", "PeerTimeoutError"), text
        is_cut_off = failure == "cut" and rank in of_host
        others = set(range(len(hosts.n_ranks))) - {host} if is_cut_off else {host}
        names = [f"(host {other})" for other in others]
        names += [] if is_cut_off else [f"rank {culprit} "]
        assert any(name in text for name in names), text
        assert when - began < longest, text
