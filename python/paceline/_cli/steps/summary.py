"""Summarise the last steps of each process; find the rank that holds up a job."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline import _environment, _recorder
from paceline._recorder import Recording, Step

_NS_A_MS = 1e6
_OF_WHO = ("kind", "model", "rank", "world_size", "local_rank", "host", "pid", "device")


@dataclass(frozen=True)
class RankRow:
    """One rank, or the parent of replicas."""

    kind: str  # ``"rank"`` or ``"replicas"``
    model: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    device: str
    step: int
    steps: int  # how many finished steps are kept
    step_ms: float | None  # the median, from the end of a step to the end of the next
    reducing: float | None  # this process's part of sums: a share of that time
    waiting: float | None  # for others: likewise
    awaited: dict[int, float]  # the ranks that it waited for: shares of all its waits
    activity: str  # what it does now
    seconds: float  # since when
    awaiting: int | None  # the rank that it waits for, if any
    rss_bytes: int | None
    history: list[float] = field(default_factory=list)  # milliseconds of the last steps


@dataclass(frozen=True)
class Job:
    """The rows of one job, by rank; the others wait longest for `slowest`."""

    job: str
    slowest: int | None
    rows: list[RankRow]


def rss_bytes(pid: int) -> int | None:
    """Return the memory that a process has in use; None if it has just ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def step_times(steps: Sequence[Step]) -> list[int]:
    """Return the time of each step except the first, whose begin is not known."""
    return [
        after.end - before.end
        for before, after in itertools.pairwise(steps)
        if after.number == before.number + 1
    ]


def waiting_of(step: Step) -> int:
    """Return how long a step waited for others, as far as it is known."""
    at_the_end = step.reduced - step.backward_end - step.reducing if step.reduced else 0
    return max(step.waiting, at_the_end)


def row_of(recording: Recording) -> RankRow:
    """Return the row of one process's recording."""
    who, now, steps = recording.who, recording.now, recording.steps()
    times = step_times(steps)
    median = statistics.median(times) if times else None
    return RankRow(
        **{name: who[name] for name in _OF_WHO},
        step=now.step,
        steps=len(steps),
        step_ms=median / _NS_A_MS if median else None,
        reducing=_share([s.reducing for s in steps], median),
        waiting=_share(list(map(waiting_of, steps)), median),
        awaited=_awaited(steps),
        activity=now.activity,
        seconds=max(time.monotonic_ns() - now.since, 0) / 1e9,
        awaiting=now.awaiting if now.awaiting >= 0 else None,
        rss_bytes=rss_bytes(who["pid"]),
        history=[round(t / _NS_A_MS, 3) for t in times],
    )


def _awaited(steps: Iterable[Step]) -> dict[int, float]:
    waits: Counter[int] = Counter()
    for step in steps:
        if step.awaited >= 0:
            waits[step.awaited] += waiting_of(step)
    whole = waits.total()
    return {rank: ns / whole for rank, ns in waits.most_common()} if whole else {}


def _share(parts: list[int], whole: float | None) -> float | None:
    return min(statistics.median(parts) / whole, 1.0) if whole else None


def slowest_of(rows: Iterable[RankRow]) -> int | None:
    """Return the rank for which the others wait longest."""
    waits: dict[int, float] = defaultdict(float)
    for row in rows:
        for rank, share in row.awaited.items():
            waits[rank] += share * (row.waiting or 0.0)
    return max(waits, key=lambda rank: waits[rank], default=None)


def read(
    pid: int | None = None, job: str | None = None
) -> tuple[list[Recording], list[str]]:
    """Return the requested recordings, and what is wrong with unreadable ones."""
    name = _environment.recorder_name()
    recordings, problems = [], []
    for found in _recorder.open_all(name) if name is not None else ():
        if isinstance(found, _recorder.RecordingError):
            problems.append(str(found))
        elif _is_meant(found, pid, job):
            recordings.append(found)
        else:
            found.close()
    return recordings, problems


def _is_meant(recording: Recording, pid: int | None, job: str | None) -> bool:
    who = recording.who
    if pid is not None and who["pid"] != pid:
        return False
    return job is None or job in (who["job"], who["job"].rpartition(":")[2])


def jobs(recordings: Iterable[Recording]) -> list[Job]:
    """Return the jobs of the recordings; the ranks of a wrapper are one job."""
    found: dict[str, list[RankRow]] = {}
    for recording in recordings:
        found.setdefault(recording.who["job"], []).append(row_of(recording))
    return [
        Job(job, slowest_of(rows), sorted(rows, key=lambda r: (r.rank, r.pid)))
        for job, rows in found.items()
    ]


def as_json(found: Sequence[Job], problems: Sequence[str]) -> dict[str, Any]:
    """Return what ``top --json`` prints."""
    return {"jobs": [asdict(job) for job in found], "problems": list(problems)}
