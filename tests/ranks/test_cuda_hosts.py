"""GPUs of several hosts: NCCL adds up, and what ranks agree on goes over links.

Ranks that say they are on different hosts, on simulated CUDA and NCCL; one host is the
least of them.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._ddp import host_links
from support import fake_gpus
from support.hosts import Hosts, Net
from support.processes import descriptors, leftovers
from support.ranks import run_ranks, start_ranks, tell, values
from support.waiting import until

N_STEPS = 6
SECONDS = 60.0
NOTICED_SECONDS = 20.0  # on a loaded machine; what is meant is two
OUT_OF_MEMORY = 2
WORLDS = [(1, 1), (2, 2), (1, 2), (1, 1, 1)]


def on_gpu(
    rank: int, _: int, body: Callable[..., Any], hosts: Hosts, store: str, *args: Any
) -> Any:
    """Run a rank's function on its host and its GPU."""
    hosts.place(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=hosts.world_size,
        timeout=timedelta(seconds=SECONDS),
    )
    with fake_gpus.on_gpu(rank):
        return body(rank, hosts, *args)


def run_on_gpus(
    body: Callable[..., Any], hosts: Hosts, store: str, *args: Any
) -> list[Any]:
    """Return what each rank's function returns."""
    outcomes = run_ranks(
        on_gpu,
        hosts.world_size,
        body,
        hosts,
        store,
        *args,
        rendezvous="none",
        timeout=90.0,
        env=fake_gpus.environment(),
    )
    return values(outcomes)


def group_of(kind: str) -> Any:
    """Return the default group, or one that takes GPUs' tensors alone, as NCCL's."""
    return None if kind == "gloo" else dist.new_group(backend="cuda:gloo")


def n_collectives(kind: str, group: Any) -> int:
    """Return how many collectives a group has carried."""
    device = torch.device("cpu" if kind == "gloo" else "cuda")
    backend = (group or dist.group.WORLD)._get_backend(device)
    return int(backend._get_sequence_number_for_group())


def steps(model: Any, rank: int) -> list[torch.Tensor]:
    """Train; return parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    random = torch.Generator().manual_seed(rank)
    for step in range(N_STEPS):
        x = torch.randn(6, 20, generator=random)
        if step == 2:
            with model.no_sync():
                model(x, True).square().mean().backward()
        model(x, (step + rank) % 3 > 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.clone() for tensor in model.module.state_dict().values()]


def train(rank: int, hosts: Hosts, kind: str) -> Any:
    torch.manual_seed(rank)
    group = group_of(kind)
    model = paceline.DistributedDataParallel(Net(), process_group=group)
    before = n_collectives(kind, group)
    found = steps(model, rank)
    assert n_collectives(kind, group) == before, "the process group carries something"
    assert not model._session.world.uses_group
    return found


def go_on(rank: int, hosts: Hosts) -> Any:
    torch.manual_seed(0)
    ours = paceline.DistributedDataParallel(Net())
    for culprit in range(hosts.world_size):
        x = torch.full((4, 20), 0.1 * rank)
        ours(x, True).square().mean().backward()
        weight = ours.module.norm.weight
        broken = weight.register_hook(fail) if rank == culprit else None
        kind = OSError if broken else paceline.PeerError
        with pytest.raises(kind, match="no port") as caught:
            ours(x, True).square().mean().backward()
        host = hosts.host_of(culprit)
        is_near = host == hosts.host_of(rank) or hosts.n_ranks[host] > 1
        name = f"rank {culprit}" if is_near else f"rank {culprit} (host {host})"
        assert broken or name in str(caught.value)
        if broken is not None:
            broken.remove()
    ours.zero_grad()
    return steps(ours, rank)


def train_in_all_ways(rank: int, hosts: Hosts) -> list[torch.Tensor]:
    found = go_on(rank, hosts)
    return found + [t for kind in ("gloo", "device") for t in train(rank, hosts, kind)]


@pytest.mark.parametrize("n_ranks", WORLDS)
def test_gpus_of_several_hosts_have_the_bits_of_those_of_one(
    n_ranks: tuple[int, ...], store: str
) -> None:
    hosts = Hosts(n_ranks)
    apart = run_on_gpus(train_in_all_ways, hosts, store)
    together = run_on_gpus(train_in_all_ways, Hosts((hosts.world_size,)), store + ".1")
    for ours, theirs in zip(apart, together, strict=True):
        assert all(map(torch.equal, ours, theirs))


def lack_links(rank: int, hosts: Hosts, lack: str) -> Any:
    logging.basicConfig(level=logging.WARNING)
    if lack == "encrypted":
        os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
    elif rank == hosts.world_size - 1:
        host_links.LinkListener.__init__ = fail  # type: ignore[method-assign]
    model = paceline.DistributedDataParallel(Net())
    steps(model, rank)
    return model._session.world.uses_group


def fail(*_: Any) -> None:
    raise OSError("no port is free")


@pytest.mark.parametrize("lack", ["a listener", "encrypted"])
def test_gpus_of_hosts_without_links_agree_by_the_group(lack: str, store: str) -> None:
    assert run_on_gpus(lack_links, Hosts((1, 1)), store, lack) == [True, True]


# ---- failures -----------------------------------------------------------------------


def n_live() -> int:
    """Return how many objects of the devices there are."""
    gc.collect()
    fake_gpus.fake().fake_let_go()  # of threads that were left behind in NCCL
    return int(fake_gpus.fake().fake_live_objects())


def lack_memory(rank: int, hosts: Hosts, function: str) -> Any:
    last = hosts.world_size - 1
    steps(paceline.DistributedDataParallel(Net()), rank)  # opens what is opened once
    before, files = n_live(), descriptors()
    dist.barrier()
    code = OUT_OF_MEMORY if function == "cuMemAlloc" else 1  # unhandled CUDA error
    if rank == last:
        for name in ("cuMemAlloc", "ncclMemAlloc") if code == 2 else (function,):
            fake_gpus.fake().fake_fail(name.encode(), 1, code)
            if code == OUT_OF_MEMORY:  # and with torch's cache empty
                fake_gpus.fake().fake_fail(name.encode(), 2, code)
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
def test_a_gpu_that_cannot_join_is_told_to_all_hosts(
    function: str, n_ranks: tuple[int, ...], store: str
) -> None:
    found = run_on_gpus(lack_memory, Hosts(n_ranks), store, function)
    for (kind, words), uses_group in found[:-1]:
        assert kind == "PeerError", words
        assert f"rank {len(found) - 1}" in words
        assert not uses_group
    (kind, _), uses_group = found[-1]
    assert kind == ("MemoryError" if function == "cuMemAlloc" else "OSError")
    assert not uses_group


def fork_one_that_sleeps() -> int:
    child = os.fork()
    if child == 0:
        time.sleep(SECONDS)
        os._exit(0)
    return child


def step_until_it_fails(rank: int, hosts: Hosts, how: str, culprit: int) -> Any:
    files = descriptors()
    model = paceline.DistributedDataParallel(Net())
    x = torch.ones(4, 20)
    told = None
    try:
        for step in range(100_000):
            if step == 5:
                child = 0
                if how == "kill a parent" and rank == culprit:
                    child = fork_one_that_sleeps()
                tell(child)
            if step == 20 and how == "raise" and rank == culprit:
                raise KeyError("its own")
            if step == 20 and how == "fewer" and rank == culprit:
                return "left", time.monotonic(), ""
            model(x, True).square().mean().backward()
    except (RuntimeError, KeyError) as error:
        told = type(error).__name__, time.monotonic(), str(error)
        with pytest.raises(RuntimeError, match="rank"):
            model(x, True).sum().backward()
    del model
    assert len(hosts.n_ranks) > 1 or leftovers(files) == []
    return told


HOWS = ("kill", "kill a parent", "raise", "fewer")
ON_HOSTS = [((1, 1), 1), ((2, 2), 2), ((2, 2), 3)]
ENDS = [(how, *row) for how, row in itertools.product(HOWS, ON_HOSTS)]
ENDS += [("kill", (3,), 0), ("fewer", (2,), 1)]


@pytest.mark.parametrize(("how", "n_ranks", "culprit"), ENDS)
def test_a_rank_that_is_gone_is_named_on_every_host(
    how: str, n_ranks: tuple[int, ...], culprit: int, store: str
) -> None:
    hosts = Hosts(n_ranks)
    with start_ranks(
        on_gpu,
        hosts.world_size,
        step_until_it_fails,
        hosts,
        store,
        how,
        culprit,
        rendezvous="none",
        timeout=90.0,
        env=fake_gpus.environment(),
    ) as ranks:
        children = [ranks.hear(rank) for rank in range(hosts.world_size)]
        began = time.monotonic()
        if how.startswith("kill"):
            os.kill(ranks.pids[culprit], signal.SIGKILL)
        outcomes = ranks.wait()
        for child in filter(None, children):
            os.kill(child, signal.SIGKILL)
    names = [f"rank {culprit}", f"ranks {culprit} to {culprit + 1} (host 1)"]
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            continue
        assert outcome.is_ok, outcome
        kind, when, text = outcome.value
        assert kind == "PeerError", text
        assert any(name in text for name in names), text
        if how == "kill" and len(n_ranks) == 1:
            died = f"{names[0]} (process {ranks.pids[culprit]}) died"
            assert text.startswith(f"rank {rank}: {died}")
        assert when - began < NOTICED_SECONDS


def die_before_the_device_is_done(rank: int, hosts: Hosts) -> Any:
    model = paceline.DistributedDataParallel(Net())
    x = torch.ones(4, 20)
    for _ in range(3):
        model(x, True).square().mean().backward()
    if rank == hosts.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(3.0)  # and so is told by rank 0, that cannot go on
    told = []
    for _ in range(2):
        with pytest.raises(paceline.PeerError) as caught:
            model(x, True).square().mean().backward()
        told.append(str(caught.value))
    return told


def test_a_rank_is_named_whose_end_lost_the_means_of_a_step(store: str) -> None:
    with start_ranks(
        on_gpu,
        4,
        die_before_the_device_is_done,
        Hosts((2, 2)),
        store,
        rendezvous="none",
        timeout=90.0,
        env=fake_gpus.environment(blocking=0),  # no host waits for its device
    ) as ranks:
        outcomes = ranks.wait()
    for outcome in outcomes[:3]:
        assert outcome.is_ok, outcome
        for text in outcome.value:
            assert "rank 3" in text or "ranks 2 to 3 (host 1)" in text, text
        assert "start again from what was saved" in outcome.value[1], outcome


def sleep_while_another_fails(rank: int, hosts: Hosts) -> Any:
    """The host of rank 0 sleeps in the middle of a backward, its GPU waits."""
    model = paceline.DistributedDataParallel(Net())
    x = torch.ones(4, 20)
    model(x, True).sum().backward()
    if rank > 0:
        weight = model.module.norm.weight
        weight.register_hook(fail)
        with pytest.raises(OSError, match="no port"):
            model(x, True).sum().backward()
        return None

    def wait_for_the_gpu(_: torch.Tensor) -> None:
        fake_gpus.synchronize()

    model.module.first.weight.register_hook(wait_for_the_gpu)
    with pytest.raises(paceline.PeerError, match="no port"):
        model(x, True).sum().backward()
    return None


def test_a_host_whose_gpu_waits_is_woken_where_another_fails(store: str) -> None:
    run_on_gpus(sleep_while_another_fails, Hosts((1, 1)), store)
