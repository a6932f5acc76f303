"""Time the meeting of ranks at the end of a backward on GPUs, which exchanges the used
parameters and failures: a few hundred bytes through the hosts' memory.

Ranks are on one host, or claim to be on several, over the loopback.  Shared memory and
links take turns with a Gloo group, which carried this data in earlier versions::

    python tests/bench/bench_meeting.py
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from paceline._ddp.rendezvous import Meeting
from support.hosts import Hosts
from support.ranks import run_ranks, values

WORLDS = [(2,), (1, 1), (2, 2), (1, 1, 1, 1)]
N_BYTES = 320  # flags of a model of 161 parameters, cut to cache lines
N_BLOCKS, N_MEETINGS, N_SETTLE = 9, 100, 10


def connect(hosts: Hosts, by_group: bool) -> Any:
    """Make a world over the default group, which it uses for all data or for none."""
    if by_group:
        os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"  # as on hosts without links
    meeting = Meeting(dist.group.WORLD)
    meeting.exchange(None)
    if by_group:
        meeting._lacks_memory = True
    world = meeting.connect(4096, 4)
    os.environ.pop("GLOO_DEVICE_TRANSPORT", None)
    assert world.uses_group == by_group
    return world


def meet(world: Any, n: int) -> tuple[float, float, float]:
    """Return the microseconds, CPU microseconds and sleeps of a meeting."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(n):
        world.wait(world.issue("all-reduce", "uint8", "max", 0, N_BYTES))
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    slept = after.ru_nvcsw - before.ru_nvcsw
    return seconds / n * 1e6, cpu / n * 1e6, slept / n


def measure(rank: int, _: int, hosts: Hosts, store: str) -> list[tuple[Any, Any]]:
    hosts.join(rank, store, 60)
    worlds = [connect(hosts, by_group) for by_group in (False, True)]
    blocks = []
    for block in range(N_BLOCKS):
        found = {}
        for k in (0, 1) if block % 2 else (1, 0):
            meet(worlds[k], N_SETTLE)
            found[k] = meet(worlds[k], N_MEETINGS)
        blocks.append((found[0], found[1]))
    return blocks


def main() -> None:
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; a meeting, on rank 0:")
    print("medians of shared memory and links -> over Gloo, and quartiles of the ratio")
    for n_ranks in WORLDS:
        hosts = Hosts(n_ranks)
        with tempfile.TemporaryDirectory() as folder:
            blocks = values(
                run_ranks(
                    measure,
                    hosts.world_size,
                    hosts,
                    f"{folder}/store",
                    rendezvous="none",
                    timeout=150.0,
                )
            )[0]
        print("ranks of each host:", *n_ranks)
        for k, unit in enumerate(("us", "us of the CPU", "sleeps")):
            pairs = [(ours[k], theirs[k]) for ours, theirs in blocks]
            ours, theirs = map(statistics.median, zip(*pairs, strict=True))
            line = f"  {ours:8.1f} -> {theirs:8.1f} {unit}"
            if all(a > 0 for a, _ in pairs):  # in some meetings no rank has to wait
                low, _, high = statistics.quantiles([b / a for a, b in pairs], n=4)
                line += f" ({low:.1f} to {high:.1f})"
            print(line)


if __name__ == "__main__":
    main()
