"""Times and orders of sampled steps, for ``_get_ddp_logging_data()``.

The first ten steps are sampled, then every hundredth, as in torch.  In a sampled step
the reducer notes when each gradient arrives; without a reducer, hooks on the nodes that
accumulate them do.  In other steps nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paceline import _native
from paceline._compat import torch_core
from paceline._ddp.step_callbacks import StepCallbacks

N_FIRST = 10
DEFAULT_RATE = 100


@dataclass
class Sample:
    """One measured step; times in nanoseconds since the epoch, 0 while unknown."""

    number: int  # of the forward, from 1
    forward_start: int
    forward_end: int = 0
    end: int = 0  # all averages were in place
    # (parameter, time) of each gradient
    arrivals: list[tuple[int, int]] = field(default_factory=list)

    def arrives(self, index: int, *_: Any) -> None:
        """Note the arrival of a parameter's gradient; a hook on its node."""
        self.arrivals.append((index, time.time_ns()))

    @property
    def order(self) -> list[int]:
        """The parameters in the order in which their last gradients arrived."""
        return sorted(dict(self.arrivals), key=dict(self.arrivals).__getitem__)

    def times(self, buckets: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return torch's entries; communication begins with the first full bucket."""
        came = dict(self.arrivals)  # the last time of each
        last = max(came.values())
        full = [
            max((came[i] for i in each if i in came), default=last) for each in buckets
        ]
        communicated = min(full, default=last)
        end = max(self.end, last)
        return {
            "forward_compute_time": max(self.forward_end - self.forward_start, 1),
            "backward_compute_time": max(last - self.forward_end, 1),
            "backward_comm_time": max(end - communicated, 1),
            "backward_compute_comm_overlap_time": max(last - communicated, 0),
            "forward_compute_time_start": self.forward_start,
            "backward_compute_time_start": self.forward_end,
            "backward_compute_time_end": last,
            "backward_comm_time_start": communicated,
            "backward_comm_time_end": end,
        }


_AVERAGED = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


class StepLog:
    """The history of a wrapper's synchronised steps."""

    def __init__(self) -> None:
        self.iteration = 0  # synchronised forwards so far
        self.rate = DEFAULT_RATE
        self.is_static = True  # each step had equally many gradients of each parameter
        self.has_rebuilt = False
        self.entries: dict[str, Any] = {}  # logging data that steps produce
        self.first_buckets: list[list[int]] = []
        self.last: Sample | None = None  # the last sample recorded
        self._sample: Sample | None = None
        self._buckets: list[list[int]] = []
        self._handles: list[Any] = []  # of hooks
        self._nodes: list[Any] = []  # with hooks, until the graph keeps those it uses
        self._first_counts: bytes | None = None
        self._n_recorded = 0

    def compare(self, reducer: _native.Reducer | None) -> None:
        """Record the last step's gradient counts: torch's test of a static graph."""
        if reducer is not None and not reducer.is_active:
            self._compare(reducer.ready_counts)

    def _compare(self, counts: bytes) -> None:
        if self._first_counts is None and any(counts):
            self._first_counts = counts
        elif counts != self._first_counts and any(counts):
            self.is_static = False

    def note_error(self, message: str) -> None:
        """Note an error: ``has_error``, ``error`` and ``iteration`` in the data."""
        self.entries |= {"has_error": 1, "error": message, "iteration": self.iteration}

    @property
    def n_buckets_used(self) -> int:
        """How many buckets had a gradient of this rank in the last sampled step."""
        came = {i for i, _ in self.last.arrivals} if self.last is not None else set()
        return sum(not came.isdisjoint(bucket) for bucket in self._buckets)

    def forward_begins(
        self,
        parameters: Sequence[torch.nn.Parameter],
        reducer: _native.Reducer | None,
        callbacks: StepCallbacks,
    ) -> None:
        """Record the step before, and measure this one, if they are sampled."""
        if self.is_static:
            self._compare(reducer.ready_counts if reducer is not None else b"")
        if self._sample is not None:
            self._record(self._sample, parameters, reducer)
            self._sample = None
            callbacks.attach(reducer)
        self.iteration = number = self.iteration + 1
        if (
            number <= N_FIRST or number % self.rate == 0
        ) and not torch_core.is_autograd_compiled():
            self._measure(parameters, reducer, callbacks)

    def forward_ends(self) -> None:
        """Note the time, in a measured step."""
        if self._sample is not None:
            self._sample.forward_end = time.time_ns()
            self._nodes = []

    def _measure(
        self,
        parameters: Sequence[torch.nn.Parameter],
        reducer: _native.Reducer | None,
        callbacks: StepCallbacks,
    ) -> None:
        sample = self._sample = Sample(self.iteration, time.time_ns())
        if reducer is not None:
            self._buckets = reducer.buckets
            reducer.note_arrivals(True)
            callbacks.once(reducer, partial(self._ends, sample))
            return
        for i, parameter in enumerate(parameters):
            node = torch_core.accumulation_node(parameter)
            if node is not None:
                self._nodes.append(node)
                self._handles.append(node.register_hook(partial(sample.arrives, i)))

    def _ends(self, sample: Sample) -> None:
        if self._sample is sample:
            sample.end = time.time_ns()

    def _record(
        self,
        sample: Sample,
        parameters: Sequence[torch.nn.Parameter],
        reducer: _native.Reducer | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if reducer is not None:
            ahead = time.time_ns() - time.monotonic_ns()
            noted = enumerate(reducer.note_arrivals(False))
            in_order = sorted((at + ahead, i) for i, at in noted if at > 0)
            sample.arrivals = [(i, at) for at, i in in_order]
        is_complete = reducer is None or sample.end > 0  # otherwise not synchronised
        if not sample.arrivals or sample.forward_end == 0 or not is_complete:
            return
        came = {i for i, _ in sample.arrivals}
        buckets = reducer.buckets if reducer is not None else [sample.order]
        if reducer is None:
            self._buckets = buckets
            self._compare(bytes(i in came for i in range(len(parameters))))
        self.last = sample
        times = sample.times(self._buckets)
        n = self._n_recorded = self._n_recorded + 1
        for name in _AVERAGED:
            before = self.entries.get(f"avg_{name}", 0)
            times[f"avg_{name}"] = (before * (n - 1) + times[name]) // n
        sizes = [p.numel() * p.element_size() for p in parameters]
        self.entries |= times
        self.entries |= {
            "iteration": sample.number,
            "unused_parameter_size": sum(
                size for i, size in enumerate(sizes) if i not in came
            ),
            "num_buckets_reduced": len(self._buckets),
            "prev_iteration_grad_ready_order_indices": join_numbers(sample.order),
            "has_rebuilt_buckets": int(sample.number > 1),
        }
        if sample.number > 1:
            self.entries |= {
                "rebuilt_bucket_sizes": join_numbers(
                    sum(sizes[i] for i in bucket) for bucket in buckets
                ),
                "rebuilt_per_bucket_param_indices": ", ".join(
                    " ".join(map(str, bucket)) for bucket in buckets
                ),
            }


def join_numbers(numbers: Iterable[int]) -> str:
    """Return numbers in torch's format."""
    return ", ".join(map(str, numbers))


# These run in backwards, which torch.compile may trace.
torch_core.skip_frames(Sample.arrives, StepLog._ends)
