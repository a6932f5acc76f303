"""Network namespaces, each with an address of its own on a bridge: hosts to a program.

They need root; links can be slow, or be cut.  The bridge has a namespace of its own,
too: nothing of the machine's is touched.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress

_CLONE_NEWNET = 0x40000000
_FOLDER = "/run/netns"
INTERFACE = "eth0"
"""Of each namespace, on the way to the others."""


def enter(name: str) -> None:
    """Move this process to a network namespace."""
    fd = os.open(f"{_FOLDER}/{name}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Network:
    """Namespaces on a bridge; :meth:`close` removes them all.

    Parameters
    ----------
    n_hosts : int
    """

    def __init__(self, n_hosts: int) -> None:
        tag = f"pl{os.getpid() % 100000}"
        self.bridge = f"{tag}b"
        self.names = tuple(f"{tag}h{h}" for h in range(n_hosts))
        self.addresses = tuple(f"10.213.77.{h + 1}" for h in range(n_hosts))
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        run("ip", "netns", "add", self.bridge)
        run("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.bridge, "link", "set", "br0", "up")
        for name, address in zip(self.names, self.addresses, strict=True):
            run("ip", "netns", "add", name)
            run(
                *("ip", "-n", name, "link", "add", INTERFACE, "type", "veth"),
                *("peer", "name", name, "netns", self.bridge),
            )
            run("ip", "-n", self.bridge, "link", "set", name, "master", "br0")
            run("ip", "-n", self.bridge, "link", "set", name, "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            run("ip", "-n", name, "link", "set", INTERFACE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")

    def limit(self, *words: str) -> None:
        """Have each host's link behave so, in the words of ``tc qdisc``."""
        for name in self.names:
            run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", *words)

    def cut(self, host: int) -> None:
        """Take a host off the bridge: nothing is told, nothing arrives."""
        run("ip", "-n", self.bridge, "link", "set", self.names[host], "nomaster")

    def close(self) -> None:
        for name in (*self.names, self.bridge):
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)


def why_no_network() -> str:
    """Return why this process can make no namespaces; empty where it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    name = f"pl{os.getpid() % 100000}t"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"no namespaces: {error.stderr.strip()}"
    return ""
