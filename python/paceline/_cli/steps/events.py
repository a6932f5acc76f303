"""Recorded steps as a trace: the JSON of trace events that Perfetto and Chrome read.

Each wrapper is a process of the trace, with a lane (a thread, to these programs) for
its steps, and one for each kind of event in them.  Events of a lane do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline._cli.steps.summary import waiting_of
from paceline._recorder import Bucket, Recording, Step

Event = dict[str, Any]

STEP, FORWARD, BACKWARD, WAIT, REDUCTION = 1, 2, 3, 4, 5
"""Lanes; further lanes of reductions follow the last."""
_NAMES = {STEP: "steps", FORWARD: "forward", BACKWARD: "backward", WAIT: "waits"}


class _Lanes:
    """One process's events, in microseconds since `origin` (in nanoseconds)."""

    def __init__(self, pid: int, origin: int) -> None:
        self.events: list[Event] = []
        self._pid, self._origin = pid, origin
        self._ends: list[int] = []  # of each lane of reductions

    def name(self, what: str, lane: int, **args: Any) -> None:
        """Add metadata."""
        self.events.append(
            {"ph": "M", "name": what, "pid": self._pid, "tid": lane, "ts": 0}
            | {"args": args}
        )

    def add(self, name: str, lane: int, begin: int, end: int, **args: Any) -> None:
        """Add an event from one time to another, if both are known."""
        if begin == 0 or end < begin:
            return
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "cat": _NAMES.get(lane, "reduction"),
                "ts": (begin - self._origin) / 1000,
                "dur": (end - begin) / 1000,
                "pid": self._pid,
                "tid": lane,
                "args": args,
            }
        )

    def add_reduction(self, name: str, begin: int, end: int, **args: Any) -> None:
        """Add a bucket, in the first lane whose last bucket has ended."""
        if begin == 0 or end < begin:
            return
        index = next((i for i, at in enumerate(self._ends) if at <= begin), None)
        if index is None:
            index = len(self._ends)
            self._ends.append(0)
        self._ends[index] = end
        self.add(name, REDUCTION + index, begin, end, **args)

    @property
    def used(self) -> list[tuple[int, str]]:
        """The lanes and their names."""
        reductions = [f"reduction {i + 1}" for i in range(len(self._ends))]
        if len(reductions) == 1:
            reductions = ["reduction"]
        return [*_NAMES.items(), *enumerate(reductions, REDUCTION)]


def trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the trace of some processes of one host, all by the host's clock."""
    found = [(recording, recording.steps()) for recording in recordings]
    begins = [step.begin for _, steps in found for step in steps if step.begin]
    origin = min(begins, default=0)
    events: list[Event] = []
    for index, (recording, steps) in enumerate(found):
        events += _process(recording, steps, index, origin)
    offset = found[0][0].who["wall_minus_monotonic_ns"] if found else 0
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "origin_ns_since_epoch": origin + offset if origin else 0,
            "jobs": sorted({recording.who["job"] for recording, _ in found}),
        },
    }


def _process(
    recording: Recording, steps: Iterable[Step], index: int, origin: int
) -> list[Event]:
    who = recording.who
    lanes = _Lanes(index + 1, origin)
    replicas = who["kind"] == "replicas"
    what = "replicas" if replicas else f"rank {who['rank']} of {who['world_size']}"
    for step in steps:
        _add_phases(lanes, step)
        if not replicas:
            _add_rank(lanes, step)
    name = f"{what}: {who['model']}, pid {who['pid']} on {who['host']}"
    lanes.name("process_name", 0, name=name)
    lanes.name("process_sort_index", 0, sort_index=who["rank"])
    for lane, text in lanes.used:
        lanes.name("thread_name", lane, name=text)
        lanes.name("thread_sort_index", lane, sort_index=lane)
    return lanes.events


def _add_phases(lanes: _Lanes, step: Step) -> None:
    number = step.number
    lanes.add(f"step {number}", STEP, step.begin, step.end, step=number)
    lanes.add("forward", FORWARD, step.forward_begin, step.forward_end, step=number)
    end = step.backward_end or step.end
    lanes.add("backward", BACKWARD, step.backward_begin, end, step=number)


def _add_rank(lanes: _Lanes, step: Step) -> None:
    args: dict[str, Any] = {"step": step.number, "waiting_ms": waiting_of(step) / 1e6}
    name = "wait"
    if step.awaited >= 0:
        name, args = f"wait for rank {step.awaited}", {**args, "rank": step.awaited}
    lanes.add(name, WAIT, step.backward_end, step.reduced, **args)
    buckets = sorted(enumerate(step.buckets), key=lambda each: _span(each[1], step))
    for b, bucket in buckets:
        begin, end = _span(bucket, step)
        args = {
            "step": step.number,
            "bytes": bucket.n_bytes,
            "ready_us_before": (begin - bucket.ready) / 1000 if bucket.ready else None,
        }
        lanes.add_reduction(f"bucket {b}", begin, end, **args)


def _span(bucket: Bucket, step: Step) -> tuple[int, int]:
    """Return when a bucket was reduced; if others did it, when it was in flight."""
    return bucket.begin or bucket.ready, bucket.end or step.reduced
