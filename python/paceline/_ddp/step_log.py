"""Times and orders of sampled steps, for ``_get_ddp_logging_data()``.

The first ten steps are sampled, then every hundredth, as in torch.  Their times are
those of the recorder; 0 if steps are not recorded.  The order of gradients is that of
the buckets, and so that of rank 0's first step.  On a rank alone, which averages
nothing, nothing is measured: times are 0, and every parameter counts as used.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from paceline import _native, _recorder

N_FIRST = 10
DEFAULT_RATE = 100


class StepLog:
    """The history of a wrapper's synchronised steps."""

    def __init__(self) -> None:
        self.iteration = 0  # synchronised forwards so far
        self.rate = DEFAULT_RATE
        self.has_rebuilt = False
        self.entries: dict[str, Any] = {}  # logging data that steps produce
        self.first_buckets: list[list[int]] = []
        self.n_buckets_used = 0  # that had a gradient of this rank, as last noted
        self._step = 0  # the one that the last forward began
        self._is_static = True
        self._first_counts: bytes | None = None
        self._n_noted = 0

    def is_static(self, reducer: _native.Reducer | None) -> bool:
        """Tell whether every step had equally many gradients of each parameter.

        This is torch's test of a static graph.  False if nothing counts gradients.
        """
        if reducer is not None and not reducer.is_active:
            counts = reducer.ready_counts
            if self._first_counts is None and any(counts):
                self._first_counts = counts
            self._is_static &= counts == self._first_counts or not any(counts)
        return self._is_static and reducer is not None

    def note_error(self, message: str) -> None:
        """Note an error: ``has_error``, ``error`` and ``iteration`` in the data."""
        self.entries |= {"has_error": 1, "error": message, "iteration": self.iteration}

    def forward_begins(self, session: Any) -> None:
        """Note the forward before, and its step, if it is sampled."""
        reducer = session.reducer
        if self._is_static:
            self.is_static(reducer)
        n_begun = reducer.step if reducer is not None else self._step
        is_sampled = self.iteration <= N_FIRST or self.iteration % self.rate == 0
        if self.iteration > 0 and is_sampled:
            number = self._step if self._step <= n_begun else 0  # 0: no backward
            self._note(session, _recorder.own_step(session.recorder, number))
        self.iteration += 1
        self._step = n_begun + 1

    def _note(self, session: Any, step: _recorder.Step) -> None:
        wrapper, reducer = session.wrapper, session.reducer
        sizes = [p.numel() * p.element_size() for p in session.model.trainable]
        every = range(len(sizes))
        counts = reducer.ready_counts if reducer is not None else b"\1" * len(every)
        buckets = reducer.buckets if reducer is not None else [every[::-1]]
        came = {i for i, n in enumerate(counts) if n}
        has_rebuilt = wrapper.static_graph or not wrapper.find_unused_parameters
        has_rebuilt = has_rebuilt and self._n_noted > 0
        self.n_buckets_used = 0
        self.entries |= {
            "iteration": self.iteration,
            "unused_parameter_size": sum(
                size for i, size in enumerate(sizes) if came and i not in came
            ),
            "num_buckets_reduced": 0,
            "has_rebuilt_buckets": int(has_rebuilt),
        }
        if has_rebuilt:
            self.entries |= {
                "rebuilt_bucket_sizes": join_numbers(
                    sum(sizes[i] for i in bucket) for bucket in buckets
                ),
                "rebuilt_per_bucket_param_indices": ", ".join(
                    " ".join(map(str, bucket)) for bucket in buckets
                ),
            }
        if step.number == 0 or not came:  # no backward, or it has failed
            return
        times = _times(step)
        n = self._n_noted = self._n_noted + 1
        for name in _AVERAGED:
            before = self.entries.get(f"avg_{name}", 0)
            times[f"avg_{name}"] = (before * (n - 1) + times[name]) // n
        self.n_buckets_used = sum(not came.isdisjoint(bucket) for bucket in buckets)
        self.entries |= times | {
            "num_buckets_reduced": len(buckets),
            "prev_iteration_grad_ready_order_indices": join_numbers(
                i for bucket in buckets for i in bucket if i in came
            ),
        }


_AVERAGED = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


def _times(step: _recorder.Step) -> dict[str, int]:
    """Return torch's entries; communication begins with the first full bucket.

    Times are in nanoseconds since the epoch.
    """
    ahead = time.time_ns() - time.monotonic_ns() if step.end else 0
    ready = (bucket.ready for bucket in step.buckets if bucket.ready)
    first = min(ready, default=step.backward_end)
    known = step.forward_begin, step.forward_end, first, step.backward_end, step.end
    begin, middle, full, last, end = (at + ahead for at in known)
    return {
        "forward_compute_time": middle - begin,
        "backward_compute_time": last - middle,
        "backward_comm_time": end - full,
        "backward_compute_comm_overlap_time": max(last - full, 0),
        "forward_compute_time_start": begin,
        "backward_compute_time_start": middle,
        "backward_compute_time_end": last,
        "backward_comm_time_start": full,
        "backward_comm_time_end": end,
    }


def join_numbers(numbers: Iterable[int]) -> str:
    """Return numbers in torch's format."""
    return ", ".join(map(str, numbers))
