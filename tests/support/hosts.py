"""Several hosts on one machine: ranks that share no memory, joined by a network.

There are two ways.  With both, a rank calls `place()` first:

* apart: ranks claim to be on different hosts, and connect over the loopback;
* namespaces: each host is a network namespace that the test has made.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paceline._ddp import peers
from torch import nn

from support.namespaces import INTERFACE, Network, enter, why_no_network


@dataclass(frozen=True)
class Hosts:
    """The number of ranks on each host, and the hosts' namespaces, if any."""

    n_ranks: tuple[int, ...]
    names: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts together."""
        return sum(self.n_ranks)

    def host_of(self, rank: int) -> int:
        host = 0
        while rank >= sum(self.n_ranks[: host + 1]):
            host += 1
        return host

    def place(self, rank: int) -> None:
        """Move this process, a rank, to its host."""
        host = self.host_of(rank)
        if self.names:
            enter(self.names[host])
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
            return
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        real = peers.Host.here.__func__  # type: ignore[attr-defined]

        def here(cls: Any) -> Any:
            return dataclasses.replace(real(cls), boot=f"host {host}")

        peers.Host.here = classmethod(here)  # type: ignore[assignment, method-assign]

    def join(self, rank: int, store: str, seconds: float) -> None:
        """Place this process on its host and join the process group."""
        self.place(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=seconds),
        )


class Net(nn.Module):
    """Has buffers, a part that some steps do not use, and dtypes of two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 300)
        self.norm = nn.BatchNorm1d(300)
        self.odd = nn.Linear(300, 300, bias=False)
        self.last = nn.Linear(300, 5).double()

    def forward(self, x: torch.Tensor, uses_odd: bool) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        if uses_odd:
            hidden = hidden + self.odd(hidden)
        return self.last(hidden.double())


def make_network(n_ranks: Sequence[int]) -> tuple[Network, Hosts]:
    """Return a network and its hosts; skip the test if none can be made."""
    reason = why_no_network()
    if reason:
        pytest.skip(reason)
    try:
        network = Network(len(n_ranks))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network of namespaces: {error.stderr.strip()}")
    return network, Hosts(tuple(n_ranks), network.names)
