"""Groups that take no CPU tensors (NCCL): the ranks meet over the group's store.

A Gloo group that was made only for GPUs represents one of NCCL: torch refuses to send a
CPU tensor over it.
"""

import time
from datetime import timedelta

import cases
import paceline
import pytest
import torch
import torch.distributed as dist
from cases import Twin, apart, assert_same_grads, integer_weights
from paceline._compat import torch_groups
from paceline._ddp.rendezvous import Meeting
from support.processes import descriptors, leftovers
from support.ranks import run_ranks, start_ranks, tell
from torch import nn


def device_group(seconds=10.0):
    return dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=seconds))


def wrap(group, module, **options):
    return paceline.DistributedDataParallel(module, process_group=group, **options)


def module():
    return integer_weights(nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 2)))


def train(ranks, model, steps=3):
    """Compare means with exact ones; all values are multiples of the world size.

    Ranks on several hosts divide before they sum.
    """
    twin = Twin(ranks, module())
    twin.ours = model
    cases.train(twin, ranks, steps, lambda out: ranks.n * out.sum())


def test_torch_itself_carries_no_cpu_tensor_by_such_a_group(ranks):
    group = device_group()
    assert torch_groups.is_device_bound(group)
    assert not torch_groups.is_device_bound(ranks.group)
    with pytest.raises(RuntimeError, match="No backend type associated with"):
        dist.all_reduce(torch.zeros(1), group=group)


def test_a_module_on_the_cpu_trains_in_a_group_that_has_no_cpu_tensors(ranks):
    model = wrap(device_group(), module())
    assert not Meeting(model.process_group)._has_cpu
    train(ranks, model)


def test_a_rank_that_is_alone_in_such_a_group_meets_nobody(ranks):
    alone = [dist.new_group([rank], backend="cuda:gloo") for rank in range(ranks.n)]
    x, plain = ranks.integers(2, 6), module()
    model = wrap(alone[ranks.rank], module())
    for each in (plain, model):
        each(x).sum().backward()
    assert_same_grads(model, plain)


def test_ranks_on_several_hosts_say_their_words_by_a_group_of_our_own(ranks):
    before = len(dist.distributed_c10d._world.pg_map)
    with apart():
        model = wrap(device_group(), module())
    train(ranks, model)
    assert len(dist.distributed_c10d._world.pg_map) == before + 1  # device_group()'s


def test_ranks_that_have_made_other_groups_before_meet_all_the_same(ranks):
    alone = {"ranks": [ranks.rank], "backend": "gloo"}
    alone["use_local_synchronization"] = True
    group = device_group()
    if ranks.rank == 0:  # now group names differ; from torch 2.14 on of all groups
        dist.new_group(**alone)
    with apart():
        model = wrap(group, module())
    train(ranks, model, steps=1)
    if ranks.rank == 1:  # now they are alike again, for the next tests
        dist.new_group(**alone)


def test_two_wrappers_of_a_group_do_not_hear_each_others_words(ranks):
    group = device_group()
    twins = [Twin(ranks, module()) for _ in range(2)]
    for twin in twins:
        twin.ours = wrap(group, module())
    for step in range(2):
        for twin in reversed(twins):
            twin.zero()
            x = ranks.integers(2, 6, key=step)
            twin.step(lambda model, x=x: model(x).sum())


def test_words_of_an_earlier_exchange_do_not_stay_in_the_store(ranks):
    group = device_group()
    meeting = Meeting(group)
    for number in range(3):
        mine = (ranks.rank, "x" * 100_000, number)
        told = meeting.exchange(mine, tuple[int, str, int])
        assert [row[::2] for row in told] == [(0, number), (1, number)]
    ranks.all(None)
    store = meeting._peers.store
    for number in range(3):
        assert not store.check([f"message/{number}/{ranks.rank}"])
        assert store.check([f"messages/{number}"]) == (number == 2)


def test_the_timeout_is_that_of_the_group_for_the_device(ranks):
    group = device_group(seconds=77.0)
    for kind in ("cpu", "cuda"):
        assert torch_groups.group_timeout_seconds(group, kind) == 77.0


# ---- in separate processes ----------------------------------------------------------


def meet_without(rank, n_ranks, absent):
    group = device_group(seconds=1.0)
    dist.barrier()
    before = descriptors()
    if rank == absent:
        return None
    started = time.monotonic()
    with pytest.raises(paceline.PeerTimeoutError) as caught:
        wrap(group, module())
    seconds, words = time.monotonic() - started, str(caught.value)
    del caught
    return seconds, words, leftovers(before)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_is_named_after_the_timeout(absent):
    outcomes = run_ranks(meet_without, 2, absent)
    seconds, words, left = outcomes[1 - absent].value
    assert f"ranks [{absent}] have not come to this construction within 1 s" in words
    assert seconds >= 1.0
    assert left == []


def die_after_meeting(rank, n_ranks, victim):
    group = device_group(seconds=60.0)
    meeting = Meeting(group)
    meeting.exchange("words")  # after this, each rank knows all processes
    tell("met")
    if rank == victim:
        time.sleep(60)
    with pytest.raises(paceline.PeerError) as caught:
        meeting.exchange("more")
    return str(caught.value)


@pytest.mark.parametrize(("victim", "store"), [(2, "file"), (0, "tcp")])
def test_a_rank_that_dies_between_its_words_is_named_at_once(victim, store):
    with start_ranks(die_after_meeting, 3, victim, rendezvous=store) as ranks:
        assert [ranks.hear(rank) for rank in range(3)] == ["met"] * 3
        ranks.kill(victim)
        pid = ranks.pids[victim]
        outcomes = ranks.wait()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            words = f"rank {victim} (process {pid}) died during construction"
            assert words in outcome.value, outcome
