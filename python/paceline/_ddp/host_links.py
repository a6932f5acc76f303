"""Connections between the first ranks of hosts: see csrc/comm/links.h.

Each first rank listens while the world is made, at the addresses that the process group
uses.  Both ends of a connection prove that they have the job's key, by an HMAC over
random numbers that both have drawn for this connection::

    listener                                 caller
    greeting, random number      -------->
                                 <--------   host, stream, random number, proof
    proof                        -------->

The listener reads from all callers at the same time.  So one that proves nothing, or
sends slowly, delays no other.
"""

from __future__ import annotations

import fcntl
import functools
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from paceline import _native

N_STREAMS = _native.N_LINK_STREAMS
_GREETING = struct.Struct("!16s32s")
_MAGIC = b"paceline links 2"
_WHO = struct.Struct("!HB32s")  # the caller's host, a stream, a random number
_RANDOM_BYTES = _PROOF_BYTES = 32
_CALL_BYTES = _WHO.size + _PROOF_BYTES
_PROOF_SECONDS = 2.0
"""How long a caller may take to prove that it is a first rank."""
_TRY_SECONDS = 3.0
"""How long a caller waits for one address before it tries the next."""
_MOST_CALLERS = 128
"""How many callers may be about to prove something; the oldest is dropped."""
_CHECK_EVERY_SECONDS = 0.1
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_NOT_FOUND = (OSError, UnicodeError)  # the latter: a name that no host may have
_ADVICE = (
    "open TCP between the hosts' addresses, or name their interface by "
    "GLOO_SOCKET_IFNAME"
)


@dataclass(frozen=True)
class Offer:
    """Where the first rank of a host listens: the likeliest address first."""

    addresses: tuple[tuple[str, int], ...]  # with ports

    def __post_init__(self) -> None:
        for address, port in self.addresses:
            ipaddress.ip_address(address)
            if not 0 < port < 1 << 16:
                raise ValueError(f"port {port} is out of range")

    def __str__(self) -> str:
        return " or ".join(f"{address} port {port}" for address, port in self.addresses)


class LinkListener:
    """Listens for the first ranks of hosts with higher numbers.

    Raises ``OSError`` if it cannot listen at any address.  `check` raises if a rank is
    gone, so that no host waits for its call.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._servers: list[socket.socket] = []
        problems = []
        for address in own_addresses():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                server = socket.create_server((address, 0), family=family, backlog=512)
                self._servers.append(server)
            except OSError as error:
                problems.append(f"{address}: {error}")
        if not self._servers:
            raise OSError(f"cannot listen at any address ({'; '.join(problems)})")
        names = [server.getsockname() for server in self._servers]
        self.offer = Offer(tuple((name[0], name[1]) for name in names))

    def close(self) -> None:
        """Stop listening."""
        close_all(self._servers)

    def connect_all(
        self, offers: Sequence[Offer], host: int, key: bytes, seconds: float
    ) -> list[socket.socket | None]:
        """Return the sockets to all other hosts, `N_STREAMS` each; None for this one.

        `offers` has one offer for each host; `host` is this host's number.  Raises
        ``OSError`` if a host cannot be reached or does not come in time.
        """
        until = time.monotonic() + seconds
        sockets: list[socket.socket | None] = [None] * (len(offers) * N_STREAMS)
        try:
            for other, offer in enumerate(offers[:host]):
                addresses = deque(offer.addresses)
                for stream in range(N_STREAMS):
                    who = _WHO.pack(host, stream, secrets.token_bytes(_RANDOM_BYTES))
                    found = _call(addresses, f"host {other}", who, key, until)
                    sockets[other * N_STREAMS + stream] = found
            self._accept_all(sockets, (host + 1) * N_STREAMS, key, until)
        except BaseException:
            close_all(sockets)
            raise
        for each in sockets:
            if each is not None:
                each.settimeout(None)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sockets

    def _accept_all(
        self, sockets: list[socket.socket | None], first: int, key: bytes, until: float
    ) -> None:
        """Fill `sockets` from `first` on with those of the hosts that call."""
        callers = _Callers(self._servers, key)
        missing = set(range(first, len(sockets)))
        check_at = time.monotonic() + _CHECK_EVERY_SECONDS
        try:
            while missing:
                if time.monotonic() > until:
                    hosts = sorted({at // N_STREAMS for at in missing})
                    raise TimeoutError(
                        f"hosts {hosts} have not connected to {self.offer}: {_ADVICE}"
                    )
                if time.monotonic() > check_at:
                    self._check()
                    check_at = time.monotonic() + _CHECK_EVERY_SECONDS
                for at, found in callers.poll():
                    old: socket.socket | None = found
                    if first <= at < len(sockets):  # the caller has left an older one
                        old, sockets[at] = sockets[at], found
                        missing.discard(at)
                    close_all([old])
        finally:
            callers.close()


@dataclass
class _Caller:
    random: bytes  # sent to it
    until: float
    received: bytes = b""


class _Callers:
    """Connections of callers that have proven nothing yet."""

    def __init__(self, servers: Sequence[socket.socket], key: bytes) -> None:
        self._servers, self._key = servers, key
        self._all: dict[socket.socket, _Caller] = {}  # the oldest first
        for server in servers:
            server.setblocking(False)

    def poll(self) -> Iterator[tuple[int, socket.socket]]:
        """Yield the sockets of callers with a proof, and their places."""
        for n_later, (found, caller) in enumerate(reversed([*self._all.items()])):
            if n_later >= _MOST_CALLERS or time.monotonic() > caller.until:
                del self._all[found]
                found.close()
        ready: list[Any] = connection.wait([*self._servers, *self._all], 0.1)
        for each in ready:
            if each in self._all:
                yield from self._read(each)
            else:
                self._greet(each)

    def close(self) -> None:
        """Close the connections."""
        close_all([*self._all])

    def _greet(self, server: socket.socket) -> None:
        with suppress(OSError):
            found, _ = server.accept()
            found.setblocking(False)
            until = time.monotonic() + _PROOF_SECONDS
            self._all[found] = _Caller(secrets.token_bytes(_RANDOM_BYTES), until)
            found.send(_GREETING.pack(_MAGIC, self._all[found].random))

    def _read(self, found: socket.socket) -> Iterator[tuple[int, socket.socket]]:
        caller, part = self._all[found], b""
        with suppress(OSError):
            part = found.recv(_CALL_BYTES - len(caller.received))
        caller.received += part
        if part and len(caller.received) < _CALL_BYTES:
            return
        del self._all[found]
        who, proof = caller.received[: _WHO.size], caller.received[_WHO.size :]
        expected = _prove(self._key, b"caller", caller.random, who)
        with suppress(OSError):
            if hmac.compare_digest(proof, expected):
                found.send(_prove(self._key, b"listener", caller.random, who))
                host, stream, _ = _WHO.unpack(who)
                yield host * N_STREAMS + min(stream, N_STREAMS - 1), found
                return
        found.close()


def close_all(sockets: Sequence[socket.socket | None]) -> None:
    """Close the sockets that are not None."""
    for each in sockets:
        if each is not None:
            each.close()


def _prove(key: bytes, side: bytes, random: bytes, who: bytes) -> bytes:
    return hmac.digest(key, side + random + who, "sha256")


def _receive(found: socket.socket, n_bytes: int) -> bytes:
    parts = b""
    while len(parts) < n_bytes:
        part = found.recv(n_bytes - len(parts))
        if not part:
            raise ConnectionResetError("closed before the whole message")
        parts += part
    return parts


def _call(
    addresses: deque[tuple[str, int]], name: str, who: bytes, key: bytes, until: float
) -> socket.socket:
    """Return a socket to a host; the address that has answered is the first then."""
    offer = Offer(tuple(addresses))
    problems: dict[tuple[str, int], OSError] = {}
    while addresses and (left := until - time.monotonic()) > 0:
        address = addresses[0]
        try:
            found = socket.create_connection(address, min(_TRY_SECONDS, left))
            try:
                return _prove_both(found, who, key)
            except BaseException:
                found.close()
                raise
        except (TimeoutError, ConnectionResetError, BrokenPipeError) as error:
            problems[address] = error  # the host may be busy, or flooded by strangers
            addresses.rotate(-1)
            time.sleep(0.02)
        except OSError as error:
            problems[address] = error
            addresses.remove(address)
    words = "; ".join(f"{at[0]}: {problem}" for at, problem in problems.items())
    raise ConnectionError(f"{name} cannot be reached at {offer} ({words}): {_ADVICE}")


def _prove_both(found: socket.socket, who: bytes, key: bytes) -> socket.socket:
    """Prove the key to a listener, and check that it has the key too."""
    magic, random = _GREETING.unpack(_receive(found, _GREETING.size))
    if magic != _MAGIC:
        raise ConnectionError(f"another program, or version, answers ({magic!r})")
    found.sendall(who + _prove(key, b"caller", random, who))
    answer = _receive(found, _PROOF_BYTES)
    if not hmac.compare_digest(answer, _prove(key, b"listener", random, who)):
        raise ConnectionError("the listener is not of this job")
    return found


# ---- this host's addresses ----------------------------------------------------------


def own_addresses() -> tuple[str, ...]:
    """Return this host's addresses: first those that Gloo would choose, then others.

    The loopback is only among them if there are no others.
    """
    names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    found = [address for name in names for address in _addresses_of(name)]
    if not found:
        found += _address_towards(os.environ.get("MASTER_ADDR", ""))
        found += _addresses_of_name(socket.gethostname())
    others = [each for each in found if not ipaddress.ip_address(each).is_loopback]
    return tuple(dict.fromkeys(others or found)) or ("127.0.0.1",)


def _addresses_of(interface: str) -> list[str]:
    """Return the addresses of a network interface."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
        found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope == "00":
                packed = bytes.fromhex(digits)
                found.append(socket.inet_ntop(socket.AF_INET6, packed))
    return found


def _address_towards(name: str) -> list[str]:
    """Return this host's address on the route to another host."""
    with suppress(*_NOT_FOUND):
        rows = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM) if name else []
        for family, kind, _, _, address in rows:
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return [probe.getsockname()[0]]
    return []


@functools.cache  # it may wait for a name server
def _addresses_of_name(name: str) -> list[str]:
    with suppress(*_NOT_FOUND):
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return [str(row[4][0]) for row in rows]
    return []
