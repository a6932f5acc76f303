"""Check a trace against the part of the trace-event format that Paceline uses."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

_METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Raise AssertionError if it is not valid; return each lane's events, in order.

    Complete events of a lane must be disjoint or nested, and every process and lane
    with events must have a name.
    """
    assert trace["displayTimeUnit"] in ("ms", "ns")
    lanes = defaultdict(list)
    named = defaultdict(set)
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M"), event
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            key, kind = _METADATA[event["name"]]
            assert isinstance(event["args"][key], kind)
            named[event["name"]].add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        lanes[event["pid"], event["tid"]].append(event)
    assert {pid for pid, _ in lanes} == {pid for pid, _ in named["process_name"]}
    assert set(lanes) <= named["thread_name"]
    for events in lanes.values():
        events.sort(key=lambda e: (e["ts"], -e["dur"]))
        _check_nesting(events)
    return dict(lanes)


def _check_nesting(events: list[dict[str, Any]]) -> None:
    around: list[float] = []  # ends of the events that enclose the next one
    for event in events:
        end = event["ts"] + event["dur"]
        while around and around[-1] <= event["ts"] + 1e-6:
            around.pop()
        assert not around or end <= around[-1] + 1e-6, event
        around.append(end)
