"""Network namespaces on a bridge, each with its own address, which act as hosts.

They need root.  A test can slow down links or cut them.  The bridge is in a separate
namespace too, so the machine's own network stays as it is.
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
"""Each namespace's interface to the others."""


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
        """Shape each host's link with arguments of ``tc qdisc``."""
        for name in self.names:
            run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", *words)

    def cut(self, host: int) -> None:
        """Take a host off the bridge: no data and no error reaches its peers."""
        run("ip", "-n", self.bridge, "link", "set", self.names[host], "nomaster")

    def mend(self, host: int) -> None:
        """Undo :meth:`cut`."""
        run("ip", "-n", self.bridge, "link", "set", self.names[host], "master", "br0")

    def turn_off(self, host: int) -> None:
        """Turn a host's link off: its interface has no carrier."""
        run("ip", "-n", self.bridge, "link", "set", self.names[host], "down")

    def unplug(self, host: int) -> None:
        """Remove a host's interface, as if the host had none."""
        run("ip", "-n", self.bridge, "link", "delete", self.names[host])

    def mute(self, host: int) -> None:
        """Have a host receive all and send nothing: its routes drop it silently."""
        for address in self.addresses:
            if address != self.addresses[host]:
                run("ip", "-n", self.names[host], "route", "add", "blackhole", address)

    def close(self) -> None:
        for name in (*self.names, self.bridge):
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)


def why_no_network() -> str:
    """Return why this process can make no namespaces; "" if it can."""
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
