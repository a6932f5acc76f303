"""Ranks on several hosts: they train as on one, and learn of each other's failures."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._ddp import group_comm, host_links, open_files, rendezvous
from support.hosts import Hosts, Net, make_network
from support.namespaces import Network
from support.ranks import run_ranks, start_ranks, tell, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

N_STEPS = 6
SECONDS = 60.0
NOTICED_SECONDS = 20.0  # on a loaded machine; what is meant is two
CUT_SECONDS = 8.0  # enough to make a wrapper on a loaded machine


def join(rank: int, hosts: Hosts, store: str, seconds: float = SECONDS) -> None:
    """Become a rank of a world on its host."""
    hosts.place(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=hosts.world_size,
        timeout=timedelta(seconds=seconds),
    )


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


def train(rank: int, _: int, hosts: Hosts, store: str, is_carried: bool) -> Any:
    join(rank, hosts, store)
    return compare_steps(rank, is_carried)


def compare_steps(rank: int, is_carried: bool = True) -> Any:
    if is_carried:

        def refuse(*_: Any) -> None:
            raise AssertionError("the process group carries something")

        group_comm.GroupComm.issue = refuse  # type: ignore[assignment, method-assign]
    torch.manual_seed(rank)
    ours = paceline.DistributedDataParallel(Net())
    theirs = TorchDDP(Net(), find_unused_parameters=True)
    theirs.module.load_state_dict(ours.module.state_dict())
    return steps(ours, rank), steps(theirs, rank)


def check_trained(hosts: Hosts, store: str, is_carried: bool = True) -> None:
    check_steps(
        values(
            run_ranks(
                train, hosts.world_size, hosts, store, is_carried, rendezvous="none"
            )
        )
    )


def check_steps(found: list[Any]) -> None:
    first = found[0][0]
    n_parameters = len(list(Net().parameters()))
    for ours, theirs in found:
        for k, (a, b, c) in enumerate(zip(first, ours, theirs, strict=True)):
            torch.testing.assert_close(b, c, rtol=1e-4, atol=1e-5)
            if k < n_parameters and a.dim() > 1:
                assert torch.equal(a, b), "ranks differ"


def go_on(rank: int, n_ranks: int) -> Any:
    """Fail in a step of each rank; then train as torch's wrapper does."""
    torch.manual_seed(0)
    ours = paceline.DistributedDataParallel(Net())
    for culprit in range(n_ranks):
        x = torch.full((4, 20), 0.1 * rank)
        ours(x, True).square().mean().backward()
        weight = ours.module.norm.weight
        broken = weight.register_hook(fail) if rank == culprit else None
        # A slow rank hears of it in its forward, where it waits for buffers.
        with pytest.raises(OSError if broken else paceline.PeerError, match="no port"):
            ours(x, True).square().mean().backward()
        if broken is not None:
            broken.remove()
    ours.zero_grad()
    theirs = TorchDDP(Net(), find_unused_parameters=True)
    theirs.module.load_state_dict(ours.module.state_dict())
    return steps(ours, rank), steps(theirs, rank)


def share_a_backward(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    one, two = (paceline.DistributedDataParallel(nn.Linear(2000, 500)) for _ in "ab")
    for _ in range(3):
        x = torch.full((2, 2000), 0.01 * (rank + 1))
        losses = [one(x).square().mean(), two(x).square().mean()]
        sum(losses).backward()
    return [p.grad.clone() for p in (*one.parameters(), *two.parameters())]


def mismatch(rank: int, n_ranks: int) -> str:
    try:
        width = 6 if rank == n_ranks - 1 else 5
        paceline.DistributedDataParallel(nn.Linear(3, width))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train_in_all_ways(rank: int, n_ranks: int, hosts: Hosts, store: str) -> Any:
    join(rank, hosts, store)
    said = mismatch(rank, n_ranks)
    failed, shared = go_on(rank, n_ranks), share_a_backward(rank)
    return said, failed, shared, compare_steps(rank)


@pytest.mark.parametrize("n_ranks", [(1, 1), (2, 2), (1, 2), (1, 1, 1), (2, 1, 1)])
def test_ranks_of_several_hosts_train_as_with_torch_and_after_failures(
    n_ranks: tuple[int, ...], store: str
) -> None:
    hosts = Hosts(n_ranks)
    found = values(
        run_ranks(train_in_all_ways, hosts.world_size, hosts, store, rendezvous="none")
    )
    said, failed, shared, trained = zip(*found, strict=True)
    assert all(text.startswith("MismatchError") for text in said), said
    for ours, theirs in failed:
        for first, a, b in zip(failed[0][0], ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            assert torch.equal(first, a) or a.dim() < 2
    assert all(all(map(torch.equal, shared[0], other)) for other in shared)
    check_steps(list(trained))


def lack_links(rank: int, n: int, hosts: Hosts, store: str, lack: str) -> Any:
    logging.basicConfig(level=logging.WARNING)
    if lack == "encrypted":
        os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
        join_plainly(rank, hosts, store)
    elif lack == "a listener" and rank == 1:
        host_links.LinkListener.__init__ = fail  # type: ignore[method-assign]
    elif lack == "descriptors" and rank == n - 1:
        open_files.make_room = fail
    elif lack == "a way":
        rendezvous.LINK_SECONDS = 2.0
    if lack == "a way" and rank == 0:
        host_links.LinkListener.__init__ = offer_another_port(  # type: ignore[method-assign]
            host_links.LinkListener.__init__
        )
    return train(rank, n, hosts, store, False) if lack != "encrypted" else None


def join_plainly(rank: int, hosts: Hosts, store: str) -> None:
    """Gloo here has no TLS: the variable is for Paceline alone."""
    transport = os.environ.pop("GLOO_DEVICE_TRANSPORT")
    join(rank, hosts, store)
    os.environ["GLOO_DEVICE_TRANSPORT"] = transport
    model = paceline.DistributedDataParallel(Net())
    steps(model, rank)


def fail(*_: Any) -> None:
    raise OSError("no port is free")


def offer_another_port(real: Any) -> Any:
    def init(self: Any) -> None:
        real(self)
        self.offer = dataclasses.replace(self.offer, port=9)

    return init


@pytest.mark.parametrize(
    ("n_ranks", "lack", "words"),
    [
        ((1, 1), "a listener", "rank 1: no port is free"),
        ((1, 2), "a listener", "rank 1: no port is free"),
        ((1, 2), "descriptors", "rank 2: no port is free"),
        ((1, 1), "a way", "host 0 cannot be reached at port 9"),
        ((1, 1), "encrypted", ""),
    ],
)
def test_hosts_without_links_train_by_the_group(
    n_ranks: tuple[int, ...], lack: str, words: str, store: str
) -> None:
    hosts = Hosts(n_ranks)
    outcomes = run_ranks(
        lack_links,
        hosts.world_size,
        hosts,
        store,
        lack,
        rendezvous="none",
        timeout=90.0,
    )
    values(outcomes)
    assert ("process group's own collectives" in outcomes[0].output) == bool(words)
    assert words in outcomes[0].output


# ---- failures -----------------------------------------------------------------------


def step_until_it_fails(rank: int, _: int, hosts: Hosts, store: str, how: str) -> Any:
    join(rank, hosts, store, CUT_SECONDS if how in ("stop", "cut") else SECONDS)
    model = paceline.DistributedDataParallel(Net())
    x = torch.ones(4, 20)
    try:
        for step in range(100_000):
            if step == 5:
                tell("running")
            if step == 20 and how == "raise" and rank == hosts.world_size - 1:
                raise KeyError("the last rank's own")
            if step == 20 and how == "fewer" and rank == hosts.world_size - 1:
                return "left", time.monotonic(), ""
            if how == "backward" and step == 20 and rank == hosts.world_size - 1:
                model.module.norm.weight.register_hook(fail)
            model(x, True).square().mean().backward()
    except (RuntimeError, OSError, KeyError) as error:
        told = type(error).__name__, time.monotonic(), str(error)
        tell("told")
        with pytest.raises(RuntimeError, match="rank"):
            model(x, True).sum().backward()
        return told
    return None


def fail_on(hosts: Hosts, how: str, store: str, network: Network | None = None) -> Any:
    """Have the last host fail; return what each rank says, and when it was done."""
    last = hosts.world_size - 1
    with start_ranks(
        step_until_it_fails,
        hosts.world_size,
        hosts,
        store,
        how,
        rendezvous="none",
        timeout=90.0,
    ) as ranks:
        for rank in range(hosts.world_size):
            assert ranks.hear(rank) == "running"
        began = time.monotonic()
        if how == "kill":
            os.kill(ranks.pids[last], signal.SIGKILL)
        elif how == "stop":
            os.kill(ranks.pids[last], signal.SIGSTOP)
        elif how == "cut":
            assert network is not None
            network.cut(len(hosts.n_ranks) - 1)
        if how == "stop":
            for rank in range(last):
                assert ranks.hear(rank) == "told"
            os.kill(ranks.pids[last], signal.SIGCONT)
        outcomes = ranks.wait()
    return began, outcomes


@pytest.mark.parametrize("n_ranks", [(1, 1), (2, 2), (1, 1, 1)])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", ""),
        ("raise", ""),
        ("backward", "no port is free"),
        ("fewer", ""),
    ],
)
def test_a_rank_that_fails_is_named_on_every_host(
    n_ranks: tuple[int, ...], how: str, words: str, store: str
) -> None:
    hosts = Hosts(n_ranks)
    began, outcomes = fail_on(hosts, how, store)
    first_of_last = hosts.world_size - n_ranks[-1]
    for outcome in outcomes[:-1]:
        kind, when, text = outcome.value
        assert kind == "PeerError", text
        assert f"rank {hosts.world_size - 1}" in text or f"rank {first_of_last}" in text
        assert words in text
        assert when - began < NOTICED_SECONDS
    if how == "kill":
        assert outcomes[-1].exitcode == -signal.SIGKILL


def test_a_rank_that_is_stopped_is_named_at_the_deadline(store: str) -> None:
    hosts = Hosts((1, 1))
    began, outcomes = fail_on(hosts, "stop", store)
    kind, when, text = outcomes[0].value
    assert kind == "PeerTimeoutError", text
    assert "rank 1 (host 1) kept this rank waiting" in text
    assert when - began > CUT_SECONDS - 0.5


class Step:
    """A backward that no Python code is round, and whose exception C drops."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    @property
    def gradients(self) -> None:
        torch.autograd.Variable._execution_engine.run_backward(
            (self.loss,), (torch.tensor(1.0),), False, False, (), True, True
        )


def fail_unseen(rank: int, _: int, hosts: Hosts, store: str, how: str) -> Any:
    join(rank, hosts, store)
    model, known = paceline.DistributedDataParallel(Net()), f"{store}-known"
    loss = model(torch.ones(4, 20), True).sum()
    if rank == 0:
        with pytest.raises(paceline.PeerError) as error:
            loss.backward()
        Path(known).touch()
        return str(error.value)

    def run() -> None:
        assert not hasattr(Step(loss), "gradients")
        until = time.monotonic() + NOTICED_SECONDS
        while not os.path.exists(known) and time.monotonic() < until:
            time.sleep(0.01)  # and nothing handles another exception

    model.module.norm.weight.register_hook(lack_an_attribute)
    if how == "in a thread":
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    return Path(known).exists()


def lack_an_attribute(*_: Any) -> None:
    raise AttributeError


@pytest.mark.parametrize("how", ["in a thread", "in the main thread"])
def test_an_exception_that_is_never_seen_is_told_other_hosts(
    how: str, store: str
) -> None:
    hosts = Hosts((1, 1))
    text, is_known = values(
        run_ranks(fail_unseen, 2, hosts, store, how, rendezvous="none")
    )
    assert is_known
    assert "rank 1 (host 1)" in text
    assert "an exception in its backward" in text


def wrap_anew(rank: int, _: int, hosts: Hosts, store: str) -> Any:
    join(rank, hosts, store)
    model = paceline.DistributedDataParallel(Net())
    broken = model.module.norm.weight.register_hook(fail) if rank == 1 else None
    loss = model(torch.ones(4, 20), True).sum()
    with pytest.raises((RuntimeError, OSError)):
        loss.backward()
    if broken is not None:
        broken.remove()
    module = model.module
    del model, loss
    dist.barrier()
    return steps(paceline.DistributedDataParallel(module), rank)


def test_after_a_failed_step_the_model_is_wrapped_anew(store: str) -> None:
    hosts = Hosts((1, 2))
    first, *others = values(run_ranks(wrap_anew, 3, hosts, store, rendezvous="none"))
    for other in others:
        assert all(
            torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.dim() > 1
        )


def fail_while_others_wait_for_buffers(
    rank: int, _: int, hosts: Hosts, store: str
) -> Any:
    join(rank, hosts, store)
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Net())
    x = torch.full((4, 20), 0.1 * rank)
    model(x, True).square().mean().backward()
    broken = model.module.norm.weight.register_hook(fail) if rank == 1 else None
    if rank == 2:
        time.sleep(0.5)  # rank 0 awaits it in its forward; rank 1 is in its backward
    with pytest.raises(OSError if broken else paceline.PeerError, match="no port"):
        model(x, True).square().mean().backward()
    if broken is not None:
        broken.remove()
    with model.no_sync():
        model(x, True).square().mean().backward()
    model(x, True).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_step_that_failed_in_a_forward_is_left_behind_by_one_that_accumulates(
    store: str,
) -> None:
    first, *others = values(
        run_ranks(
            fail_while_others_wait_for_buffers,
            3,
            Hosts((2, 1)),
            store,
            rendezvous="none",
        )
    )
    for other in others:
        assert all(map(torch.equal, first, other))


# ---- namespaces ---------------------------------------------------------------------


@pytest.fixture
def two_hosts() -> Iterator[tuple[Network, Hosts]]:
    network, hosts = make_network((2, 2))
    yield network, hosts
    network.close()


def test_ranks_in_namespaces_train_over_a_slow_lossy_network(
    two_hosts: tuple[Network, Hosts], store: str
) -> None:
    network, hosts = two_hosts
    try:
        network.limit("tbf", "rate", "100mbit", "burst", "16k", "latency", "1ms")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"links cannot be slowed: {error.stderr.strip()}")
    check_trained(hosts, store)


def test_a_host_that_is_cut_off_is_named_at_the_deadline(
    two_hosts: tuple[Network, Hosts], store: str
) -> None:
    network, hosts = two_hosts
    began, outcomes = fail_on(hosts, "cut", store, network)
    for rank, outcome in enumerate(outcomes):
        kind, when, text = outcome.value
        assert kind in ("PeerError", "PeerTimeoutError")
        others = "ranks 2 to 3 (host 1)" if rank < 2 else "ranks 0 to 1 (host 0)"
        assert others in text, text
        assert CUT_SECONDS - 0.5 < when - began < CUT_SECONDS + NOTICED_SECONDS
