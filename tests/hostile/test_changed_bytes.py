"""A network that changes bytes between hosts: no rank adds them up.

Each socket of host 1's first rank goes through a pair of threads, which change what
they pass on.
"""

import contextlib
import functools
import socket
import struct
import threading

import paceline
import pytest
import torch
from paceline._ddp import host_links
from support.hosts import Hosts
from support.ranks import run_ranks
from torch import nn

WIDTH = 3000
N_STEPS = 12
FIRST_CHANGED = 5  # the message, from 1, of those with the model's gradients
_HEAD = struct.Struct("<4Q")


def crc32c(crc, data):
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def receive(source, n_bytes):
    data = bytearray()
    while len(data) < n_bytes:
        more = source.recv(n_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


class Flip:
    """Changes one bit of one message: in its head, its data or its checksum."""

    def __init__(self, place):
        self.place, self.n_seen = place, 0

    def __call__(self, head, data):
        message = bytearray(head + data)
        self.n_seen += len(data) > WIDTH
        if self.n_seen == FIRST_CHANGED and len(data) > WIDTH:
            at = {"head": 3, "data": _HEAD.size + 1001, "checksum": -1}[self.place]
            message[at] ^= 0x10
        return message


class Forge(Flip):
    """Changes a bit of the data, and makes the checksum fit."""

    def __call__(self, head, data):
        self.n_seen += len(data) > WIDTH
        if self.n_seen == FIRST_CHANGED and len(data) > WIDTH:
            data[1001] ^= 0x10
            crc = crc32c(_HEAD.unpack(head)[3], data[:-4])
            data[-4:] = crc.to_bytes(4, "little")
        return head + data


def pass_messages(source, to, change):
    try:
        while True:
            head = receive(source, _HEAD.size)
            n_bytes = _HEAD.unpack(head)[2]
            to.sendall(change(head, receive(source, n_bytes and n_bytes + 4)))
    except (OSError, EOFError):
        to.close()


def pass_bytes(source, to):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            to.sendall(data)
    with contextlib.suppress(OSError):
        to.shutdown(socket.SHUT_WR)


def through_network(real, stream, change):
    """Return a socket whose bytes reach `real`, and come from it changed."""
    here, there = socket.socketpair()
    into = functools.partial(pass_messages, change=change) if stream else pass_bytes
    for run, ends in ((into, (real, there)), (pass_bytes, (there, real))):
        threading.Thread(target=run, args=ends, daemon=True).start()
    return here


def change_on_the_way(change):
    connect = host_links.LinkListener.connect_all

    def connect_all(self, *args, **kwargs):
        return [
            real and through_network(real, n % host_links.N_STREAMS, change)
            for n, real in enumerate(connect(self, *args, **kwargs))
        ]

    host_links.LinkListener.connect_all = connect_all


def train(rank, _, hosts, store, change):
    hosts.join(rank, store, 60)
    if rank == hosts.n_ranks[0]:
        change_on_the_way(change)
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(nn.Linear(WIDTH, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    taken = []
    try:
        for _ in range(N_STEPS):
            x = torch.full((2, WIDTH), 0.25 * (rank + 1))
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(float(model.module.weight.double().sum()))
    except paceline.MismatchError as error:
        with pytest.raises(paceline.MismatchError, match="weights differ since step"):
            model(x).sum().backward()
        return error, taken
    except paceline.PeerError as error:
        return error, taken
    return None, taken


def run(n_ranks, store, change):
    hosts = Hosts(n_ranks)
    outcomes = run_ranks(
        train, hosts.world_size, hosts, store, change, rendezvous="none"
    )
    assert all(outcome.is_ok for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


CHANGED = [((1, 1), "data"), ((2, 2), "head"), ((1, 1, 1), "checksum")]


@pytest.mark.parametrize(("n_ranks", "place"), CHANGED)
def test_a_changed_bit_is_an_error_on_every_rank_that_names_the_host(
    n_ranks, place, store
):
    found = run(n_ranks, store, Flip(place))
    # A host whose own data came may have ended the step before it heard.
    shortest = min((taken for _, taken in found), key=len)
    assert 0 < len(shortest) < N_STEPS - 1
    for _, taken in found:
        assert taken[: len(shortest)] == shortest
        assert len(taken) <= len(shortest) + 1
    for error, _ in found:
        assert isinstance(error, paceline.PeerError)
        assert "sent a message that arrived damaged" in str(error)
        assert "(host 0)" in str(error) or "(host 2)" in str(error)


@pytest.mark.parametrize("n_ranks", [(1, 1), (2, 1)])
def test_means_that_differ_are_an_error_on_every_rank_in_the_next_step(n_ranks, store):
    found = run(n_ranks, store, Forge("data"))
    culprit = n_ranks[0]
    for error, taken in found:
        assert isinstance(error, paceline.MismatchError)
        words = f"rank {culprit} (host 1) and rank 0 (host 0) got different means"
        assert words in str(error)
        assert error.rank == culprit
        assert error.step == len(taken)
