"""Ports of this machine: free ones, and those on which a process listens."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"  # TCP_LISTEN, in /proc/net/tcp


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(pid: int) -> list[str]:
    """Return the addresses on which a process listens for TCP, as IPv4 or IPv6."""
    links = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            links.add(os.readlink(fd))
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path(f"/proc/{pid}/net/{name}")
        for row in path.read_text().splitlines()[1:] if path.exists() else []:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == _LISTENING and f"socket:[{inode}]" in links:
                words = bytes.fromhex(local.partition(":")[0])
                swapped = [words[k : k + 4][::-1] for k in range(0, len(words), 4)]
                found.append(socket.inet_ntop(family, b"".join(swapped)))
    return found
