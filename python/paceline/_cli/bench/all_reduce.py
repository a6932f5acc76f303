"""Times one all-reduce of float32 by size: Paceline's shared memory against Gloo.

Both add, in place, on a buffer of their own: Gloo on a tensor, Paceline on this rank's
arena, where gradients lie in training too.  The two take turns in shuffled order; calls
follow each other without a barrier, for each is one by itself.  A call's time is the
mean over ranks: one rank that is woken late finds its peers ahead of it, so that its
own long and short calls alternate.

algbw is bytes divided by time; busbw = algbw * 2 (n - 1) / n, as nccl-tests define it:
the traffic a rank must send at least, so figures of several world sizes compare.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from paceline._compat import torch_core
from paceline._ddp.rendezvous import Meeting

ITEM_BYTES = 4
BYTES_PER_BLOCK = 64 << 20  # reduced in a turn, within the limits of the next line
LEAST_CALLS, MOST_CALLS = 5, 200


class Gloo:
    """torch.distributed's all_reduce on the process group that every user has."""

    def __init__(self, n_bytes: int) -> None:
        self.tensor = torch.zeros(n_bytes // ITEM_BYTES)

    def array(self, n_elems: int) -> np.ndarray:
        """Return the first elements of the buffer."""
        array: np.ndarray = self.tensor[:n_elems].numpy()
        return array

    def bind(self, n_elems: int) -> Callable[[], object]:
        """Return a call without arguments that reduces the first elements."""
        part = self.tensor[:n_elems]
        return lambda: dist.all_reduce(part)


class Paceline:
    """The world that Paceline's wrappers use, without a wrapper."""

    def __init__(self, n_bytes: int) -> None:
        torch_core.attach()
        group = dist.group.WORLD
        assert group is not None
        meeting = Meeting(group)
        meeting.exchange(None)
        self.world = cast(Any, meeting.connect(n_bytes, 64))  # it is a buffer, too
        self.buffer: np.ndarray = np.frombuffer(self.world, np.float32)

    def array(self, n_elems: int) -> np.ndarray:
        """Return the first elements of the arena."""
        return self.buffer[:n_elems]

    def bind(self, n_elems: int) -> Callable[[], object]:
        """Return a call without arguments that reduces the first elements."""
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


def over_ranks(values: Sequence[float]) -> list[float]:
    """Return the mean over ranks of each of these figures, which all ranks have."""
    mean = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mean)
    return [round(value, 1) for value in (mean / dist.get_world_size()).tolist()]


def n_calls_of(n_bytes: int) -> int:
    """Return how many calls of this size make a turn."""
    return min(max(BYTES_PER_BLOCK // n_bytes, LEAST_CALLS), MOST_CALLS)


def time_all_reduce(
    contestants: Sequence[str],
    sizes_bytes: Sequence[int],
    blocks: int,
    settle_calls: int = 2,
    seed: int = 0,
) -> dict[str, dict[str, list[float]]]:
    """Time calls by turns; all ranks of the default process group call this.

    Parameters
    ----------
    contestants : sequence of str
        Of ``MAKERS``.
    sizes_bytes : sequence of int
        Of what is reduced.
    blocks : int
        Turns of each.
    settle_calls : int, default 2
        Untimed, before each turn.
    seed : int, default 0
        Of the order of turns.

    Returns
    -------
    dict
        Microseconds of every call: ``{contestant: {bytes: [...]}}``, turn by turn.
    """
    largest = max(sizes_bytes)
    reducers = {name: MAKERS[name](largest) for name in contestants}
    order = random.Random(seed)
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in reducers}
    for n_bytes in sizes_bytes:
        n_elems = n_bytes // ITEM_BYTES
        calls = {name: r.bind(n_elems) for name, r in reducers.items()}
        for name, reducer in reducers.items():
            check(name, reducer, n_elems)
            figures[name][str(n_bytes)] = []
        for _ in range(blocks):
            for name in order.sample(list(reducers), len(reducers)):
                call, times_us = calls[name], figures[name][str(n_bytes)]
                dist.barrier()
                for _ in range(settle_calls):
                    call()
                for _ in range(n_calls_of(n_bytes)):
                    begin_ns = time.perf_counter_ns()
                    call()
                    times_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
    return {
        name: {size: over_ranks(measured) for size, measured in by_size.items()}
        for name, by_size in figures.items()
    }
