"""Times one all-reduce of float32 by size: Paceline's shared memory against Gloo.

Both add, in place, on a buffer of their own: Gloo on a tensor, Paceline on this rank's
arena, where gradients lie in training too.  The two take turns in shuffled order; calls
follow each other without a barrier, for each is one by itself.  A call's time is the
mean over ranks: one rank alone sees long and short calls by turns, see `steps.py`.

algbw is bytes divided by time; busbw = algbw * 2 (n - 1) / n, as nccl-tests define it:
the traffic a rank must send at least, so figures of several world sizes compare.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from job import Job
from steps import over_ranks

ITEM_BYTES = 4
BYTES_PER_BLOCK = 64 << 20  # reduced in a turn, within the limits of the next line
LEAST_CALLS, MOST_CALLS = 5, 200


class Gloo:
    """torch.distributed's all_reduce on the process group that every user has."""

    def __init__(self, n_bytes: int) -> None:
        self.tensor = torch.zeros(n_bytes // ITEM_BYTES)

    def array(self, n_elems: int) -> np.ndarray:
        """The first elements of the buffer."""
        array: np.ndarray = self.tensor[:n_elems].numpy()
        return array

    def bind(self, n_elems: int) -> Callable[[], object]:
        """A call without arguments that reduces the first elements."""
        part = self.tensor[:n_elems]
        return lambda: dist.all_reduce(part)


class Paceline:
    """The world that Paceline's wrappers use, without a wrapper."""

    def __init__(self, n_bytes: int) -> None:
        from paceline._compat import torch_core
        from paceline._ddp.rendezvous import Meeting

        torch_core.attach()
        meeting = Meeting(dist.group.WORLD)
        meeting.exchange(None)
        self.world = meeting.connect(n_bytes, 64)
        self.buffer = np.frombuffer(self.world, np.float32)

    def array(self, n_elems: int) -> np.ndarray:
        """The first elements of the arena."""
        return self.buffer[:n_elems]

    def bind(self, n_elems: int) -> Callable[[], object]:
        """A call without arguments that reduces the first elements."""
        issue, wait = self.world.issue, self.world.wait
        return lambda: wait(issue("all-reduce", "float32", "sum", 0, n_elems, 0))


Reducer = Gloo | Paceline
MAKERS: dict[str, Callable[[int], Reducer]] = {"gloo": Gloo, "paceline": Paceline}


def check(name: str, reducer: Reducer, n_elems: int) -> None:
    """Reduce known numbers; leave zeros, which stay zeros however often they are added.

    The numbers are small whole ones: the result is exact.
    """
    n = dist.get_world_size()
    values = reducer.array(n_elems)
    values[:] = dist.get_rank() + 1
    reducer.bind(n_elems)()
    if not (values == n * (n + 1) / 2).all():
        raise AssertionError(f"{name}: all-reduce of {n_elems} elements is wrong")
    dist.barrier()
    values[:] = 0
    dist.barrier()


def time_all_reduce(job: Job) -> dict[str, Any]:
    """Microseconds of every call: {contestant: {bytes: [...]}}."""
    largest = max(job.sizes_bytes)
    reducers = {name: MAKERS[name](largest) for name in job.contestants}
    order = random.Random(job.order_seed)
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in reducers}
    for n_bytes in job.sizes_bytes:
        n_elems = n_bytes // ITEM_BYTES
        n_calls = min(max(BYTES_PER_BLOCK // n_bytes, LEAST_CALLS), MOST_CALLS)
        calls = {name: r.bind(n_elems) for name, r in reducers.items()}
        for name, reducer in reducers.items():
            check(name, reducer, n_elems)
            figures[name][str(n_bytes)] = []
        for _ in range(job.blocks):
            for name in order.sample(list(reducers), len(reducers)):
                call, times_us = calls[name], figures[name][str(n_bytes)]
                dist.barrier()
                for _ in range(job.settle_steps):
                    call()
                for _ in range(n_calls):
                    begin_ns = time.perf_counter_ns()
                    call()
                    times_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
    means_us = {
        name: {size: over_ranks(measured) for size, measured in by_size.items()}
        for name, by_size in figures.items()
    }
    return {"times_us": means_us}
