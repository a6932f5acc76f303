"""Connections between the first ranks of hosts: see csrc/comm/links.h.

Each first rank listens at its own port while the world is made.  A caller proves by a
token, which the process group carried, that it is a first rank too.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline import _native

N_STREAMS = _native.N_LINK_STREAMS
_HELLO = struct.Struct("!16sHB")  # the listener's token, the caller's host, a stream
_WELCOME = b"\x01"
_CONNECT_SECONDS = 5.0
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class Offer:
    """Where the first rank of a host listens."""

    addresses: tuple[str, ...]  # that may reach it, the likeliest first
    port: int
    token: bytes  # which a caller must send


class LinkListener:
    """Listens for the first ranks of hosts with higher numbers."""

    def __init__(self) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=both, backlog=512
        )
        port = self._server.getsockname()[1]
        self.offer = Offer(own_addresses(), port, secrets.token_bytes(16))

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def connect_all(
        self, offers: Sequence[Offer], host: int, seconds: float
    ) -> list[socket.socket | None]:
        """Return the sockets to all other hosts, `N_STREAMS` each; None for this one.

        `offers` has one offer for each host; `host` is this host's number.  Raises
        ``OSError`` if a host cannot be reached or does not come in time.
        """
        until = time.monotonic() + seconds
        sockets: list[socket.socket | None] = [None] * (len(offers) * N_STREAMS)
        try:
            for other in range(host):
                found = _connect(offers[other], host, other, until)
                sockets[other * N_STREAMS : (other + 1) * N_STREAMS] = found
            n_missing = (len(offers) - 1 - host) * N_STREAMS
            while n_missing > 0:
                n_missing -= self._accept(sockets, host, until)
        except BaseException:
            close_all(sockets)
            raise
        for each in sockets:
            if each is not None:
                each.settimeout(None)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sockets

    def _accept(
        self, sockets: list[socket.socket | None], host: int, until: float
    ) -> int:
        """Accept a caller if it is expected; return the number accepted."""
        self._server.settimeout(_seconds_left(until))
        try:
            found, _ = self._server.accept()
        except TimeoutError:
            later = range(host + 1, len(sockets) // N_STREAMS)
            missing = [h for h in later if sockets[h * N_STREAMS] is None]
            raise TimeoutError(f"hosts {missing} have not connected") from None
        with suppress(OSError):
            found.settimeout(min(_CONNECT_SECONDS, _seconds_left(until)))
            token, other, stream = _HELLO.unpack(_receive(found, _HELLO.size))
            at = other * N_STREAMS + stream
            is_expected = host < other and stream < N_STREAMS and at < len(sockets)
            is_known = secrets.compare_digest(token, self.offer.token)
            if is_known and is_expected and sockets[at] is None:
                found.sendall(_WELCOME)
                sockets[at] = found
                return 1
        found.close()
        return 0


def close_all(sockets: Sequence[socket.socket | None]) -> None:
    """Close the sockets that are not None."""
    for each in sockets:
        if each is not None:
            each.close()


def _seconds_left(until: float) -> float:
    return max(until - time.monotonic(), 0.001)


def _receive(found: socket.socket, n_bytes: int) -> bytes:
    parts = b""
    while len(parts) < n_bytes:
        part = found.recv(n_bytes - len(parts))
        if not part:
            raise ConnectionResetError("closed before the whole message")
        parts += part
    return parts


def _connect(offer: Offer, host: int, other: int, until: float) -> list[socket.socket]:
    """Return the sockets to a host, by the first of its addresses that answers."""
    problems: list[str] = []
    for address in offer.addresses:
        found: list[socket.socket] = []
        try:
            for stream in range(N_STREAMS):
                seconds = min(_CONNECT_SECONDS, _seconds_left(until))
                found.append(socket.create_connection((address, offer.port), seconds))
                found[-1].sendall(_HELLO.pack(offer.token, host, stream))
            for each in found:  # that host may be connecting to others first
                each.settimeout(_seconds_left(until))
                _receive(each, len(_WELCOME))
            return found
        except OSError as error:
            problems.append(f"{address}: {error}")
            close_all(found)
    raise ConnectionError(
        f"host {other} cannot be reached at port {offer.port} ({'; '.join(problems)})"
    )


# ---- this host's addresses ----------------------------------------------------------


def own_addresses() -> tuple[str, ...]:
    """Return this host's addresses: first those that Gloo would choose, then others."""
    found: dict[str, None] = {}
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        found.update(dict.fromkeys(_addresses_of(name)))
    if not found:
        found.update(dict.fromkeys(_address_towards(os.environ.get("MASTER_ADDR"))))
        found.update(dict.fromkeys(_addresses_of_name(socket.gethostname())))
    return tuple(found) or ("127.0.0.1",)


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


def _address_towards(name: str | None) -> list[str]:
    """Return this host's address on the route to another host."""
    if not name:
        return []
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(
            name, 9, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return [probe.getsockname()[0]]
    return []


def _addresses_of_name(name: str) -> list[str]:
    with suppress(OSError):
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return [str(row[4][0]) for row in rows]
    return []
