"""A neighbour on the network, while the first ranks of hosts connect to each other."""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections import deque

import paceline
import pytest
import torch
from paceline._ddp import host_links
from paceline._ddp.host_links import LinkListener, Offer
from support.hosts import Hosts
from support.ranks import run_ranks, values
from support.threads import in_threads

KEY, OTHER_KEY = secrets.token_bytes(32), secrets.token_bytes(32)
CALL_BYTES = host_links._CALL_BYTES
SECONDS = 60.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def reach(address):
    found = socket.create_connection(address, 10)
    found.settimeout(10)
    return found


# ---- neighbours: each is called with an address, until `is_over` --------------------


def send_random_bytes(address, is_over):
    while not is_over.is_set():
        with reach(address) as found:
            found.sendall(secrets.token_bytes(CALL_BYTES))
            found.recv(1 << 10)
            assert not found.recv(1 << 10), "it must not get an answer"


def send_slowly(address, is_over):
    with reach(address) as found:
        while not is_over.is_set():
            found.sendall(b"x")
            time.sleep(0.5)


def say_nothing(address, is_over):
    with reach(address):
        is_over.wait()


def hang_up(address, is_over):
    while not is_over.is_set():
        reach(address).close()


def flood(address, is_over):
    found = []
    try:
        while not is_over.is_set() and len(found) < 600:
            found.append(reach(address))
        is_over.wait()
    finally:
        host_links.close_all(found)


def be_of_another_job(address, is_over):
    while not is_over.is_set():
        who = host_links._WHO.pack(1, 0, secrets.token_bytes(32))
        with pytest.raises(OSError, match=r"cannot be reached|refused"):
            host_links._call(
                deque([address]), "host 0", who, OTHER_KEY, time.monotonic() + 0.5
            )


NEIGHBOURS = [
    send_random_bytes,
    send_slowly,
    say_nothing,
    hang_up,
    flood,
    be_of_another_job,
]


def connect(listeners):
    """Connect hosts, each in a thread; return their sockets and the time it took."""
    offers = [listener.offer for listener in listeners]
    begin = time.monotonic()
    found = in_threads(
        lambda host: listeners[host].connect_all(offers, host, KEY, SECONDS),
        len(listeners),
    )
    return found, time.monotonic() - begin


def check_connected(found):
    """Check that each pair of sockets of two hosts is one connection."""
    n_hosts = len(found)
    for one in range(n_hosts):
        for other in range(one + 1, n_hosts):
            for stream in range(host_links.N_STREAMS):
                here = found[one][other * host_links.N_STREAMS + stream]
                there = found[other][one * host_links.N_STREAMS + stream]
                assert here.getpeername() == there.getsockname()


def close(listeners, found):
    for each in [*listeners, *(s for sockets in found for s in sockets if s)]:
        each.close()


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=lambda each: each.__name__)
def test_a_stranger_neither_joins_nor_delays_the_hosts(neighbour):
    listeners = [LinkListener() for _ in range(3)]
    is_over = threading.Event()

    def act(address):
        with contextlib.suppress(OSError):  # the listener closes in the end
            neighbour(address, is_over)

    strangers = [
        threading.Thread(target=act, args=(address,), daemon=True)
        for listener in listeners
        for address in listener.offer.addresses
    ]
    for stranger in strangers:
        stranger.start()
    time.sleep(0.2)
    found, seconds = connect(listeners)
    is_over.set()
    check_connected(found)
    close(listeners, found)
    assert seconds < SECONDS / 2, "it must not wait for a stranger's deadline"
    for stranger in strangers:
        stranger.join(20)


def test_recorded_bytes_of_a_caller_are_useless_later():
    sent = []

    class Recording(socket.socket):
        def sendall(self, data, *flags):
            sent.append(bytes(data))
            return super().sendall(data, *flags)

    listeners = [LinkListener() for _ in range(2)]
    real = socket.create_connection

    def create_connection(address, seconds):
        found = Recording(fileno=real(address, seconds).detach())
        found.settimeout(seconds)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", create_connection)
        found, _ = connect(listeners)
    close(listeners, found)
    assert len(sent) == host_links.N_STREAMS

    listeners = [LinkListener() for _ in range(2)]

    def replay():
        for call in sent * 5:
            with reach(listeners[0].offer.addresses[0]) as again:
                again.recv(1 << 10)
                again.sendall(call)
                with pytest.raises(OSError):  # noqa: PT012
                    assert not again.recv(1 << 10)
                    raise ConnectionResetError

    stranger = threading.Thread(target=replay, daemon=True)
    stranger.start()
    time.sleep(0.1)
    found, _ = connect(listeners)
    check_connected(found)
    close(listeners, found)


# ---- a stranger in the place of a host ----------------------------------------------


def answer(server, words, is_over):
    server.settimeout(0.1)
    while not is_over.is_set():
        try:
            found, _ = server.accept()
        except TimeoutError:
            continue
        with found:
            found.sendall(words)
            found.settimeout(5)
            found.recv(1 << 10)
            found.sendall(secrets.token_bytes(32))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (
            b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3 and more bytes\r\n",
            "another program",
        ),
        (b"paceline links 1" + bytes(32), "another program, or version"),
        (host_links._MAGIC + bytes(32), "not of this job"),
    ],
)
def test_a_stranger_in_the_place_of_a_host_is_refused_in_words(words, found):
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        thread = threading.Thread(target=answer, args=(server, words, is_over))
        thread.start()
        try:
            listener = LinkListener()
            offers = [Offer((address,)), listener.offer]
            with pytest.raises(OSError, match=found) as caught:
                listener.connect_all(offers, 1, KEY, SECONDS)
        finally:
            is_over.set()
            thread.join()
            listener.close()
    assert f"127.0.0.1 port {address[1]}" in str(caught.value)
    assert "open TCP between the hosts' addresses" in str(caught.value)


def test_a_host_is_reached_at_an_address_behind_one_that_is_silent():
    listeners = [LinkListener() for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        first = Offer((silent.getsockname(), *listeners[0].offer.addresses))
        offers = [first, listeners[1].offer]
        found = in_threads(
            lambda host: listeners[host].connect_all(offers, host, KEY, SECONDS), 2
        )
    check_connected(found)
    close(listeners, found)


def test_a_host_that_was_too_slow_to_answer_takes_the_second_call(monkeypatch):
    monkeypatch.setattr(host_links, "_TRY_SECONDS", 0.2)
    read, has_given_up = host_links._Callers._read, threading.Event()
    rotated = deque.rotate

    class Addresses(deque):
        def rotate(self, n):
            has_given_up.set()
            rotated(self, n)

    def read_late(self, caller):
        assert has_given_up.wait(SECONDS)
        yield from read(self, caller)

    monkeypatch.setattr(host_links, "deque", Addresses)
    monkeypatch.setattr(host_links._Callers, "_read", read_late)
    listeners = [LinkListener() for _ in range(2)]
    found, _ = connect(listeners)
    check_connected(found)
    close(listeners, found)


# ---- where a host listens -----------------------------------------------------------


def test_hosts_listen_at_the_process_groups_address_alone(monkeypatch):
    assert [a for a, _ in LinkListener().offer.addresses] == ["127.0.0.1"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(host_links, "_addresses_of_name", lambda _: ["127.0.1.1"])
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert host_links.own_addresses() in (
        ("127.0.0.1", "127.0.1.1"),
        ("::1", "127.0.1.1"),
    )
    monkeypatch.setattr(host_links, "_addresses_of_name", lambda _: ["10.9.8.7"])
    assert host_links.own_addresses() == ("10.9.8.7",)
    with pytest.raises(OSError, match=r"cannot listen at any address \(10\.9\.8\.7"):
        LinkListener()
    assert os.environ["MASTER_ADDR"] == "localhost"


@pytest.mark.parametrize("name", ["a" * 64, "a..b", "\udcff"])
def test_a_host_may_have_a_name_that_cannot_be_looked_up(name, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setenv("MASTER_ADDR", name)
    assert host_links.own_addresses() == ("127.0.0.1",)


# ---- ranks --------------------------------------------------------------------------


def train_beside_strangers(rank, _, hosts, store):
    hosts.join(rank, store, 30)
    is_over = threading.Event()
    if rank == hosts.world_size - 1:
        connect_all = LinkListener.connect_all

        def beside_strangers(self, offers, *args):
            for neighbour in (send_slowly, say_nothing, flood):
                threading.Thread(
                    target=neighbour,
                    args=(offers[0].addresses[0], is_over),
                    daemon=True,
                ).start()
            time.sleep(0.5)
            return connect_all(self, offers, *args)

        LinkListener.connect_all = beside_strangers
    model = paceline.DistributedDataParallel(torch.nn.Linear(4, 1))
    is_over.set()
    model(torch.full((2, 4), float(rank + 1))).sum().backward()
    return model._session.world.uses_group, model.module.weight.grad.tolist()


@pytest.mark.parametrize("n_ranks", [(1, 1), (2, 2)])
def test_ranks_train_over_links_beside_slow_silent_and_flooding_callers(n_ranks, store):
    hosts = Hosts(n_ranks)
    found = values(
        run_ranks(
            train_beside_strangers, hosts.world_size, hosts, store, rendezvous="none"
        )
    )
    mean = sum(range(1, hosts.world_size + 1)) / hosts.world_size * 2
    assert found == [(False, [[mean] * 4])] * hosts.world_size
