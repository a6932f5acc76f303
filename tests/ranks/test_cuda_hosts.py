"""GPUs on several hosts: NCCL sums gradients, and links carry the ranks' agreements.

Ranks claim to be on one or several hosts, with simulated CUDA and NCCL.  test_hosts.py
has the tests that hold for ranks on the CPU too.
"""

import functools
import gc
import os
import signal

import paceline
import pytest
import torch
import torch.distributed as dist
from host_cases import fail, fail_in_turn, run_on_hosts, start_on_hosts, steps
from support import fake_gpus
from support.hosts import Hosts, Net
from support.processes import descriptors, leftovers
from support.waiting import until

OUT_OF_MEMORY = 2
WORLDS = [(1, 1), (2, 2), (1, 2), (1, 1, 1)]

run_on_gpus = functools.partial(run_on_hosts, device="gpu")


def group_of(kind):
    """Return the default group, or one that takes only GPU tensors, like NCCL's."""
    return None if kind == "gloo" else dist.new_group(backend="cuda:gloo")


def n_collectives(kind, group):
    """Return the number of collectives that a group has carried."""
    device = torch.device("cpu" if kind == "gloo" else "cuda")
    backend = (group or dist.group.WORLD)._get_backend(device)
    return int(backend._get_sequence_number_for_group())


def train(rank, hosts, kind):
    torch.manual_seed(rank)
    group = group_of(kind)
    model = paceline.DistributedDataParallel(Net(), process_group=group)
    before = n_collectives(kind, group)
    found = steps(model, rank)
    assert n_collectives(kind, group) == before, "the process group carries something"
    assert not model._session.world.uses_group
    return found


def train_in_all_ways(rank, hosts):
    found = steps(fail_in_turn(rank, hosts), rank)
    return found + [t for kind in ("gloo", "device") for t in train(rank, hosts, kind)]


@pytest.mark.parametrize("n_ranks", WORLDS)
def test_gpus_of_several_hosts_have_the_bits_of_those_of_one(n_ranks, store):
    hosts = Hosts(n_ranks)
    apart = run_on_gpus(train_in_all_ways, hosts, store)
    together = run_on_gpus(train_in_all_ways, Hosts((hosts.world_size,)), store + ".1")
    for ours, theirs in zip(apart, together, strict=True):
        assert all(map(torch.equal, ours, theirs))


# ---- failures -----------------------------------------------------------------------


def n_live():
    """Return the number of live objects of the devices."""
    gc.collect()
    fake_gpus.fake().fake_let_go()  # releases threads that are stuck in NCCL
    return int(fake_gpus.fake().fake_live_objects())


def lack_memory(rank, hosts, function):
    last = hosts.world_size - 1
    steps(paceline.DistributedDataParallel(Net()), rank)  # opens what stays open
    before, files = n_live(), descriptors()
    dist.barrier()
    code = OUT_OF_MEMORY if function == "cuMemAlloc" else 1  # unhandled CUDA error
    if rank == last:
        fake_gpus.fake().fake_fail(function.encode(), 1, code)
    with pytest.raises((MemoryError, OSError, RuntimeError)) as caught:
        paceline.DistributedDataParallel(Net())
    said = type(caught.value).__name__, str(caught.value)
    del caught
    dist.barrier()
    assert until(lambda: n_live() <= before)
    assert leftovers(files) == []
    model = paceline.DistributedDataParallel(Net())
    steps(model, rank)
    return said, model._session.world.uses_group


@pytest.mark.parametrize("n_ranks", [(2,), (1, 1), (2, 2)])
@pytest.mark.parametrize("function", ["cuMemAlloc", "ncclCommInitRank"])
def test_a_gpu_that_cannot_join_is_told_to_all_hosts(function, n_ranks, store):
    found = run_on_gpus(lack_memory, Hosts(n_ranks), store, function)
    for (kind, words), uses_group in found[:-1]:
        assert kind == "PeerError", words
        assert f"rank {len(found) - 1}" in words
        assert not uses_group
    (kind, _), uses_group = found[-1]
    assert kind == ("OutOfMemoryError" if function == "cuMemAlloc" else "OSError")
    assert not uses_group


def die_before_the_device_is_done(rank, hosts):
    model = paceline.DistributedDataParallel(Net())
    x = torch.ones(4, 20)
    for _ in range(3):
        model(x, True).square().mean().backward()
    if rank == hosts.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["told"])  # so rank 0, which cannot continue, reports it
    told = []
    for _ in range(2):
        with pytest.raises(paceline.PeerError) as caught:
            model(x, True).square().mean().backward()
        told.append(str(caught.value))
        if rank == 0:
            store.set("told", "")
    return told


def test_a_rank_is_named_whose_end_lost_the_means_of_a_step(store):
    with start_on_hosts(
        die_before_the_device_is_done,
        Hosts((2, 2)),
        store,
        device="gpu",
        blocking=0,  # hosts do not wait for their devices
    ) as ranks:
        outcomes = ranks.wait()
    for outcome in outcomes[:3]:
        assert outcome.is_ok, outcome
        for text in outcome.value:
            assert "rank 3" in text or "ranks 2 to 3 (host 1)" in text, text
        assert "start again from what was saved" in outcome.value[1], outcome


def sleep_while_another_fails(rank, hosts):
    """In the middle of a backward, rank 0's host sleeps and its GPU waits."""
    model = paceline.DistributedDataParallel(Net())
    x = torch.ones(4, 20)
    model(x, True).sum().backward()
    if rank > 0:
        weight = model.module.norm.weight
        weight.register_hook(fail)
        with pytest.raises(OSError, match="no port"):
            model(x, True).sum().backward()
        return None

    def wait_for_the_gpu(_):
        fake_gpus.synchronize()

    model.module.first.weight.register_hook(wait_for_the_gpu)
    with pytest.raises(paceline.PeerError, match="no port"):
        model(x, True).sum().backward()
    return None


def test_a_host_whose_gpu_waits_is_woken_where_another_fails(store):
    run_on_gpus(sleep_while_another_fails, Hosts((1, 1)), store)
