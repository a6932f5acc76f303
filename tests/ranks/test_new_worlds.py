"""After a step that failed, the next forward makes a new world with the other ranks."""

import contextlib
import gc
import os
import signal
import threading
import time
from unittest import mock

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline import _native
from paceline._ddp import mixed_precision, rendezvous
from support.failing import FailsInBackward
from support.hosts import Hosts
from support.ranks import run_ranks
from torch import nn

SOON_SECONDS = 10.0  # on a loaded machine


class Net(nn.Module):
    """Has its input as the gradient of its weights; may fail in backward."""

    def __init__(self):
        super().__init__()
        self.small, self.large = (nn.Parameter(torch.ones(n)) for n in (3, 5000))

    def forward(self, x, fails=False):
        out = (self.small * x).sum() + (self.large * x).sum()
        return FailsInBackward.apply(out, KeyError) if fails else out


def fail(model, rank, culprit):
    """Fail a step, which `culprit` raises in."""
    model.zero_grad()
    with pytest.raises(KeyError if rank == culprit else paceline.PeerError):
        model(torch.ones(1), rank == culprit).backward()


def step(model, rank, n_ranks):
    """Take a step, and check its gradients."""
    model.zero_grad()
    model(torch.tensor(float(rank))).backward()
    for p in model.parameters():
        assert p.grad.unique().tolist() == [(n_ranks - 1) / 2]


def pretend_hosts(rank, n_hosts):
    """Count ranks of one machine as of several hosts, a rank each."""
    if n_hosts > 1:
        Hosts((1,) * n_hosts).place(rank)


def left_over():
    gc.collect()
    with open("/proc/self/maps", encoding="ascii") as maps:
        n_maps = sum("paceline" in line for line in maps)
    n_keys = dist.distributed_c10d._get_default_store().num_keys()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), n_maps, n_keys


def fail_often(rank, n_ranks, n):
    model = paceline.DistributedDataParallel(Net())
    seen = []
    for i in range(n):
        fail(model, rank, i % n_ranks)
        step(model, rank, n_ranks)
        dist.barrier()
        seen.append(left_over())
        dist.barrier()
    return seen[2], seen[-1]


@pytest.mark.parametrize("rendezvous", ["file", "tcp"])
def test_many_failed_steps_leave_nothing_behind(rendezvous):
    for outcome in run_ranks(fail_often, 2, 30, rendezvous=rendezvous):
        early, late = outcome.value
        assert early == late


def lose_a_rank(rank, n_ranks, how, hosts):
    """Lose rank 1, after it has survived a failure of rank 2."""
    if len(hosts) > 1:
        Hosts(hosts).place(rank)
    store = dist.distributed_c10d._get_default_store()
    model = paceline.DistributedDataParallel(Net())
    step(model, rank, n_ranks)
    fail(model, rank, 2)
    if rank == 1 and how == "dies":
        os._exit(7)
    if rank == 1 and how == "dies as others connect":
        end = mock.Mock(side_effect=lambda *_, **__: os._exit(7))
        rendezvous.host_links.LinkListener.connect_all = end
        rendezvous.Meeting._make_world = end
        model(torch.ones(1))
    if rank == 1 and how == "leaves":
        model = None
        gc.collect()
        store.wait(["told/0", "told/2"])
        return None
    said = []
    for _ in range(2):  # the next forward tries again
        began = time.monotonic()
        with pytest.raises(paceline.PeerError) as caught:
            model(torch.ones(1))
        assert time.monotonic() - began < SOON_SECONDS
        said.append((caught.value.rank, str(caught.value)))
    store.set(f"told/{rank}", "")
    return said


@pytest.mark.parametrize("hosts", [(3,), (1, 1, 1), (2, 1)])
@pytest.mark.parametrize(
    ("how", "words"),
    [("dies", "died"), ("dies as others connect", "died"), ("leaves", "left")],
)
def test_a_rank_that_does_not_come_again_is_named(how, words, hosts):
    for rank, outcome in enumerate(run_ranks(lose_a_rank, 3, how, hosts)):
        for culprit, said in outcome.value if rank != 1 else []:
            assert culprit == 1
            assert words in said or len(hosts) > 1


def interrupt_a_meeting(rank, n_ranks, culprit):
    model = paceline.DistributedDataParallel(Net())
    fail(model, rank, 0)
    if rank == culprit:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1))
    else:
        time.sleep(1.0 if rank == n_ranks - 1 else 0.0)
        with pytest.raises(paceline.PeerError, match=f"rank {culprit}.*KeyboardInterr"):
            model(torch.ones(1))
    for _ in range(2):
        step(model, rank, n_ranks)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_interrupt_in_the_forward_that_meets_ends_it_on_all_ranks(culprit):
    for outcome in run_ranks(interrupt_a_meeting, 3, culprit):
        assert outcome.error is None


def cut_off_a_meeting(rank, n_ranks, n_hosts, error):
    """Rank 1 fails when every rank has its new world."""
    pretend_hosts(rank, n_hosts)
    model = paceline.DistributedDataParallel(Net())
    fail(model, rank, 0)
    fails = contextlib.nullcontext() if rank == 0 else pytest.raises(error)
    with mock.patch.object(mixed_precision, "release", side_effect=error), fails:
        if rank == 1:
            model(torch.ones(1))
    if rank == 0:
        with pytest.raises(paceline.PeerError, match="step of rank 1"):
            model(torch.ones(1)).backward()
    for _ in range(2):
        step(model, rank, n_ranks)


@pytest.mark.parametrize("n_hosts", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_rank_that_fails_in_a_new_world_is_met_in_another(n_hosts, error):
    for outcome in run_ranks(cut_off_a_meeting, 2, n_hosts, error):
        assert outcome.error is None


def cross_two_wrappers(rank, n_ranks):
    """Rank 0 leaves out a step of the second wrapper, so each waits in another."""
    first, second = (paceline.DistributedDataParallel(Net()) for _ in range(2))
    i = 0
    while i < 5:
        try:
            step(first, rank, n_ranks)
            if rank == 0 and i == 1:
                raise KeyError
            step(second, rank, n_ranks)
        except KeyError:
            pass
        except paceline.MismatchError:
            latest = torch.tensor(i)
            dist.all_reduce(latest, dist.ReduceOp.MAX)
            i = int(latest)
        i += 1


def test_wrappers_that_waited_for_one_another_go_on():
    for outcome in run_ranks(cross_two_wrappers, 2):
        assert outcome.error is None


def lack(*_, **ways):
    """Make no links, and no world in memory."""
    if ways.get("group_comm") is None:
        raise OSError("none of it is left")
    return make_world(**ways)


make_world = _native.RankWorld


def go_on_by_the_group(rank, n_ranks, n_hosts):
    pretend_hosts(rank, n_hosts)
    rendezvous.host_links.LinkListener = rendezvous._native.RankWorld = lack
    model = paceline.DistributedDataParallel(Net())
    for i in range(3):
        fail(model, rank, i % n_ranks)
        step(model, rank, n_ranks)
    assert model._session.world.uses_group


@pytest.mark.parametrize("n_hosts", [1, 2])
def test_ranks_without_memory_or_links_meet_by_the_group_again(n_hosts):
    for outcome in run_ranks(go_on_by_the_group, 2, n_hosts):
        assert outcome.error is None


def keep_gradients(rank, n_ranks):
    model = paceline.DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    step(model, rank, n_ranks)
    kept = [p.grad for p in model.parameters()]
    for i in range(3):
        fail(model, rank, i % n_ranks)
        step(model, rank, n_ranks)
        model(torch.tensor(7.0)).backward()
    return [grad.unique().tolist() for grad in kept]


def test_gradients_of_a_world_that_failed_stay_as_they_are():
    for outcome in run_ranks(keep_gradients, 2):
        assert outcome.value == [[0.5], [0.5]]
