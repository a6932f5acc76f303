"""Random failures on hosts that are network namespaces.

    PYTHONPATH=tests python tests/ranks/drawn_failures.py --failures 100 --seed 7

In each run some hosts train.  Then, at a random moment, a rank or all ranks of a host
are killed or stopped, or a host is cut off.  Every remaining rank must raise an error
in time, which names the right host or rank.  Needs root.  Prints a line for each kind
of failure: its count, and the time until ranks raised.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass

import paceline
import torch
from support.hosts import Hosts
from support.namespaces import Network, why_no_network
from support.ranks import start_ranks, tell
from torch import nn

LAYOUTS = ((1, 1), (2, 2), (2, 1), (1, 1, 1), (2, 1, 2))
KINDS = ("kill a rank", "kill a host", "stop a rank", "cut a host off")
DEADLINE_SECONDS = 6.0
SLACK_SECONDS = 20.0  # on a loaded machine


@dataclass(frozen=True)
class Draw:
    """A failure: its kind, place and time."""

    kind: str
    n_ranks: tuple[int, ...]
    host: int
    rank: int
    after_seconds: float
    width: int

    @classmethod
    def of(cls, seed):
        """Draw a failure from a seed."""
        rng = random.Random(seed)
        hosts = Hosts(rng.choice(LAYOUTS))
        rank = rng.randrange(hosts.world_size)
        return cls(
            kind=KINDS[seed % len(KINDS)],
            n_ranks=hosts.n_ranks,
            host=hosts.host_of(rank),
            rank=rank,
            after_seconds=rng.uniform(0.0, 0.3),
            width=rng.choice((10, 300, 3000)),
        )

    @property
    def is_noticed_at_once(self):
        """Whether a connection breaks, so that ranks need not wait for the deadline."""
        return self.kind.startswith("kill")


def train(rank, _, hosts, store, width):
    """Take steps until one of them fails."""
    hosts.join(rank, store, DEADLINE_SECONDS)
    model = paceline.DistributedDataParallel(
        nn.Sequential(nn.Linear(100, width), nn.BatchNorm1d(width), nn.Linear(width, 9))
    )
    x = torch.ones(8, 100)
    try:
        for step in range(1_000_000):
            if step == 3:
                tell("running")
            model(x).square().mean().backward()
    except RuntimeError as error:
        return type(error).__name__, time.monotonic(), str(error)
    return None


def fail(draw, pids, hosts, network):
    """Cause the failure; return the ranks that it ended."""
    of_host = {r for r in range(hosts.world_size) if hosts.host_of(r) == draw.host}
    if draw.kind == "cut a host off":
        network.cut(draw.host)
        return set()
    gone = of_host if draw.kind == "kill a host" else {draw.rank}
    for rank in gone:
        stops = draw.kind == "stop a rank"
        os.kill(pids[rank], signal.SIGSTOP if stops else signal.SIGKILL)
    return gone


def names_culprit(draw, hosts, rank, text):
    """Tell whether a rank's error names the host or the rank that failed."""
    if draw.kind == "cut a host off" and hosts.host_of(rank) == draw.host:
        others = (h for h in range(len(hosts.n_ranks)) if h != draw.host)
        return any(f"(host {h})" in text for h in others)
    return f"(host {draw.host})" in text or f"rank {draw.rank} " in text


def check(draw, hosts, rank, outcome, began):
    """Check a remaining rank's error; return the seconds until it was raised."""
    kind, when, text = outcome.value
    seconds = when - began
    known = "PeerError", "PeerTimeoutError"
    assert kind in known, f"rank {rank}: {kind}: {text}"
    assert names_culprit(draw, hosts, rank, text), f"rank {rank}: {text}"
    most = SLACK_SECONDS + (0 if draw.is_noticed_at_once else DEADLINE_SECONDS)
    assert seconds < most, f"rank {rank}: after {seconds:.1f} s: {text}"
    return seconds


def run(draw):
    """Run a job that fails as drawn; return the seconds until each rank raised."""
    network = Network(len(draw.n_ranks))
    hosts = Hosts(draw.n_ranks, network.names)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            start_ranks(
                train,
                hosts.world_size,
                hosts,
                f"{folder}/store",
                draw.width,
                rendezvous="none",
                timeout=120.0,
            ) as ranks,
        ):
            for rank in range(hosts.world_size):
                assert ranks.hear(rank) == "running"
            time.sleep(draw.after_seconds)
            began = time.monotonic()
            gone = fail(draw, ranks.pids, hosts, network)
            if draw.kind == "stop a rank":
                time.sleep(2 * DEADLINE_SECONDS)
                os.kill(ranks.pids[draw.rank], signal.SIGCONT)
            outcomes = ranks.wait()
            return [
                check(draw, hosts, rank, outcome, began)
                for rank, outcome in enumerate(outcomes)
                if rank not in gone
            ]
    finally:
        network.close()


def main():
    """Run from the command line; exit with status 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--failures", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    reason = why_no_network()
    if reason:
        print(f"not run: {reason}")
        return 0
    taken = defaultdict(list)
    n_wrong = 0
    for seed in range(options.seed, options.seed + options.failures):
        draw = Draw.of(seed)
        try:
            taken[draw.kind].append(max(run(draw)))
        except Exception as error:  # print each one, with its seed
            n_wrong += 1
            print(f"seed {seed}: {draw}\n  {type(error).__name__}: {error}", flush=True)
    for kind, seconds in sorted(taken.items()):
        print(
            f"{kind}: {len(seconds)} times; the last rank knew after "
            f"{statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (most)"
        )
    print(f"{n_wrong} of {options.failures} went wrong")
    return min(n_wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
