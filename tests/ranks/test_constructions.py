"""If a wrapper's construction fails on one rank, all ranks raise and may try again."""

import contextlib
import functools
import os
import resource
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._ddp import rendezvous
from support.hosts import Hosts
from support.ports import free_port
from support.ranks import run_ranks, values
from support.waiting import until
from torch import nn

WIDTH = 1500
ROOM_BYTES = 1 << 20  # a world of this model takes 9 MB
GROUP_SECONDS = 60.0  # the group's timeout in run_ranks
SOON_SECONDS = GROUP_SECONDS / 2
HOSTS = [(1, 1), (2,), (2, 1)]


def place(rank, n_ranks):
    if len(n_ranks) > 1:
        Hosts(n_ranks).place(rank)


def timed(make):
    """Wrap and take a step; return the error's type and message, and its time."""
    began = time.monotonic()
    try:
        paceline.DistributedDataParallel(make())(torch.ones(2, WIDTH)).sum().backward()
    except (RuntimeError, OSError, MemoryError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def small():
    return nn.Linear(WIDTH, 2)


def lack_memory(rank, _, n_ranks, whose):
    place(rank, n_ranks)
    model = nn.Linear(WIDTH, WIDTH)
    dist.barrier()
    if rank == whose:
        with open("/proc/self/statm") as file:
            n_bytes = int(file.read().split()[0]) * resource.getpagesize()
        limits = n_bytes + ROOM_BYTES, resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, limits)
    first = timed(lambda: model)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    return first, timed(small)


@pytest.mark.parametrize("n_ranks", HOSTS)
def test_a_rank_without_memory_is_named_and_all_may_go_on(n_ranks):
    whose = 1
    arguments = sum(n_ranks), n_ranks, whose
    outcomes = values(run_ranks(lack_memory, *arguments, rendezvous="tcp"))
    for rank, ((kind, text, seconds), again) in enumerate(outcomes):
        assert kind == ("MemoryError" if rank == whose else "PeerError"), text
        assert "cannot map" in text
        assert rank == whose or f"rank {whose} could not make its world" in text
        assert seconds < SOON_SECONDS
        assert again[0] == "", again


def interrupt_who_exchanges():
    def exchanges():
        main = threading.main_thread().ident
        stack = traceback.walk_stack(sys._current_frames()[main])
        return any(frame.f_code.co_name == "_all_gather" for frame, _ in stack)

    assert until(exchanges)
    time.sleep(0.2)  # it may just have begun
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_who_waits(rank, _, n_ranks):
    """Press Ctrl-C on rank 0 while it waits for the others, which are late."""
    place(rank, n_ranks)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        threading.Thread(target=interrupt_who_exchanges).start()
    else:
        store.wait(["interrupted"])
    first = timed(small)
    if rank == 0:
        store.set("interrupted", "")
    second = timed(small)
    store = dist.PrefixStore("again", store)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=sum(n_ranks),
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    return first, second, timed(small)


@pytest.mark.parametrize("n_ranks", HOSTS)
def test_after_an_interrupted_construction_the_group_is_made_anew(n_ranks):
    outcomes = values(
        run_ranks(interrupt_who_waits, sum(n_ranks), n_ranks, rendezvous="tcp")
    )
    for rank, (first, second, third) in enumerate(outcomes):
        kind, text, seconds = first
        assert kind == ("PeerError" if rank else "KeyboardInterrupt"), text
        assert rank == 0 or "rank 0 left the construction (KeyboardInterrupt)" in text
        assert seconds < SOON_SECONDS
        kind, text, _ = second
        assert (kind, "cannot be used any more" in text) == ("RuntimeError", True), text
        assert third[0] == "", third


LOST = [  # the victim, signal, place and store; the error, the rank that it names
    (0, signal.SIGKILL, "before", "tcp", "PeerError", 0),
    (0, signal.SIGKILL, "before", "an agent's", "PeerError", None),
    (0, signal.SIGKILL, "before", "a store", "PeerError", None),
    (0, signal.SIGSTOP, "before", "tcp", "PeerTimeoutError", 0),
    (0, signal.SIGSTOP, "before", "a store", "PeerTimeoutError", None),
    (1, signal.SIGSTOP, "before", "tcp", "PeerTimeoutError", 1),
    (1, signal.SIGSTOP, "within", "tcp", "PeerTimeoutError", 1),
]


def lose_one(rank, n_ranks, victim, number, where, store, port):
    """Return the error of the other rank's construction, and the rank that it names."""
    options = {"rank": rank, "world_size": n_ranks, "timeout": timedelta(seconds=2)}
    if store == "a store":
        options["store"] = dist.TCPStore("127.0.0.1", port, n_ranks, rank == 0)
    else:
        options["init_method"] = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", **options)
    if store == "an agent's":  # from now on it looks like one
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    pids = [None] * n_ranks
    dist.all_gather_object(pids, os.getpid())
    if rank == victim:
        end = functools.partial(os.kill, os.getpid(), number)
        rendezvous.Meeting.exchange = lambda *_: end()
        if where == "before":
            end()
            return None
    try:
        with contextlib.suppress(TypeError):  # of the victim, which continues
            paceline.DistributedDataParallel(small())
    except paceline.PeerError as error:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGCONT)
        return type(error).__name__, error.rank, str(error)


@pytest.mark.parametrize(("victim", "number", "where", "store", "kind", "named"), LOST)
def test_who_is_lost_in_a_construction_is_named_if_known_and_told_from_who_is_late(
    victim, number, where, store, kind, named
):
    given = victim, number, where, store, free_port()
    outcome = run_ranks(lose_one, 2, *given, rendezvous="none")[1 - victim]
    assert outcome.is_ok, outcome
    assert outcome.value[:2] == (kind, named), outcome.value
