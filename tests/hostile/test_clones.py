"""Two machines with one boot id, as cloned or restored virtual machines have.

Network namespaces act as the machines.  Their ranks claim to be of one boot and of
equal namespaces: the first of each kind has the same number on all machines.
"""

import dataclasses
import logging

import paceline
import pytest
import torch
from paceline._ddp import host_links, peers
from support.hosts import Hosts, Net, make_network
from support.ranks import run_ranks, start_ranks, tell, values

ELSEWHERE = 1 << 23  # more than any process id here


def pretend(hosts, rank):
    """Make this rank describe its host as a clone does, after `hosts.place()`."""
    real = peers.Host.here.__func__
    same = {"boot": "of all clones", "network": 1, "processes": 2, "users": 3}
    if hosts.n_ranks == (1, 1):  # no rank of this host needs the real one
        same["pid"] = ELSEWHERE + rank
    peers.Host.here = classmethod(lambda cls: dataclasses.replace(real(cls), **same))


def count_links():
    """Return a list that gets the number of sockets of each connection to hosts."""
    counts, real = [], host_links.LinkListener.connect_all

    def connect_all(*args):
        sockets = real(*args)
        counts.append(sum(each is not None for each in sockets))
        return sockets

    host_links.LinkListener.connect_all = connect_all
    return counts


def train(rank, _, hosts, store, is_cloned):
    logging.basicConfig(level=logging.WARNING)
    hosts.join(rank, store, 60.0)
    if is_cloned:
        pretend(hosts, rank)
    counts = count_links()
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(rank)
    for step in range(4):
        x = torch.randn(6, 20, generator=random)
        model(x, step % 2 > 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = model.module.state_dict()
    return counts, model._session.world.uses_group, list(state.values())


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture(params=[(1, 1), (2, 2)], ids=["1+1", "2+2"])
def hosts(request):
    network, hosts = make_network(request.param)
    yield hosts
    network.close()


def run(hosts, store, is_cloned):
    given = hosts, f"{store}-{is_cloned}", is_cloned
    return run_ranks(train, hosts.world_size, *given, rendezvous="none")


def test_clones_are_hosts_of_their_own_that_links_join(hosts, store):
    outcomes = run(hosts, store, is_cloned=True)
    cloned, honest = values(outcomes), values(run(hosts, store, is_cloned=False))
    for rank, (ours, theirs) in enumerate(zip(cloned, honest, strict=True)):
        counts, uses_group, state = ours
        is_first = rank in (0, hosts.n_ranks[0])
        assert counts == [host_links.N_STREAMS] * is_first
        assert not uses_group
        assert all(map(torch.equal, state, theirs[2]))
    strays = list(range(hosts.n_ranks[0], hosts.world_size))
    assert f"ranks {strays} do not reach a rank" in outcomes[0].output


def interleave(rank, _, hosts, store):
    """Place ranks by turns on two hosts: links need ranks in order."""
    one_by_one = Hosts((1,) * hosts.world_size, hosts.names * 2)
    one_by_one.join(rank, store, 60.0)
    pretend(hosts, rank)
    model = paceline.DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    return model._session.world.uses_group, model.module.weight.grad


@pytest.mark.parametrize("hosts", [(2, 2)], indirect=True)
def test_clones_with_ranks_in_turn_talk_by_the_group(hosts, store):
    outcomes = run_ranks(interleave, 4, hosts, store, rendezvous="none")
    for uses_group, grad in values(outcomes):
        assert uses_group
        assert torch.equal(grad, torch.full((1, 3), 2.5))


def lose_a_rank(rank, _, hosts, store):
    hosts.join(rank, store, 60.0)
    pretend(hosts, rank)
    model = paceline.DistributedDataParallel(torch.nn.Linear(3, 1))
    tell("met")
    try:
        while True:
            model(torch.ones(1, 3)).sum().backward()
    except paceline.PeerError as error:
        return str(error)


@pytest.mark.parametrize("hosts", [(2, 2)], indirect=True)
def test_a_rank_that_dies_on_a_clone_is_named(hosts, store):
    with start_ranks(lose_a_rank, 4, hosts, store, rendezvous="none") as ranks:
        assert [ranks.hear(rank) for rank in range(4)] == ["met"] * 4
        ranks.kill(3)
        outcomes = ranks.wait()
    for rank in (0, 1, 2):
        assert "rank 3" in outcomes[rank].value or "host 1" in outcomes[rank].value
