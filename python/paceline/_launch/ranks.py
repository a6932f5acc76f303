"""The caller's side of :func:`paceline.launch`: start ranks, wait, say what failed."""

from __future__ import annotations

import linecache
import os
import pickle
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline import _errors, _native
from paceline._compat import torch_groups
from paceline._launch import payloads, rank, variables
from paceline._launch.rank import Call, Failure
from paceline._workers import main as worker_main
from paceline._workers import spawn
from paceline._workers.group import WorkerGroup

_HANDLER = f"{rank.__name__}:{rank.Rank.__name__}"
_ADDRESS = "127.0.0.1"
CAUSE_SECONDS = 5.0
"""How long the cause is waited for, where a rank has failed since another one ended."""


class RankError(RuntimeError):
    """A rank of :func:`paceline.launch` failed.

    Its cause (``__cause__``) is the rank's own exception, where that could be pickled;
    the message ends in the rank's traceback.

    Attributes
    ----------
    rank : int
        The rank that failed first.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


RankError.__module__ = "paceline"


@dataclass(frozen=True)
class _Report:
    """How a rank has ended: with a result, a failure, or by the end of its process."""

    rank: int
    time: float
    result: bytes | None = None
    failure: Failure | None = None
    words: str = ""

    @property
    def is_consequence(self) -> bool:
        return self.failure is not None and self.failure.is_consequence


def run(n: int, call: Call) -> list[Any]:
    """Make a call on each of n new ranks; return the results, by rank.

    Raise RankError, from the exception of the rank that failed first.
    """
    packed = pickle.dumps(call)
    inbox: queue.SimpleQueue[_Report] = queue.SimpleQueue()
    with _started(n) as group:
        threads = _follow_all(group, packed, inbox)
        reports = _collect(n, inbox)
        failed = [report for report in reports if report.result is None]
        if not failed:
            group.wait_until_ended()
    for thread in threads:
        thread.join()
    if failed:
        _raise(min(failed, key=lambda each: (each.is_consequence, each.time)), n)
    by_rank = sorted(reports, key=lambda each: each.rank)
    return [payloads.unpack(each.result) for each in by_rank if each.result is not None]


@contextmanager
def _started(n: int) -> Iterator[WorkerGroup]:
    """Have ranks run, and the store that they meet at; leave nothing of either."""
    store, port = torch_groups.make_tcp_server(_ADDRESS)
    try:
        group = WorkerGroup(n, _HANDLER, spawn.RANK, _environs(n, port))
        try:
            yield group
        finally:
            group.close()
    finally:
        del store  # closes the port, though a traceback may keep this frame


def _environs(n: int, port: int) -> list[dict[str, str]]:
    """Return what each rank has in its environment besides the caller's."""
    common = {
        variables.WORLD_SIZE: str(n),
        variables.LOCAL_WORLD_SIZE: str(n),
        variables.MASTER_ADDR: _ADDRESS,
        variables.MASTER_PORT: str(port),
        **rank.OWN_VARIABLES,
    }
    return [
        {**common, variables.RANK: str(k), variables.LOCAL_RANK: str(k)}
        for k in range(n)
    ]


# ---- waiting ------------------------------------------------------------------------


def _follow_all(
    group: WorkerGroup, packed: bytes, inbox: queue.SimpleQueue[_Report]
) -> list[threading.Thread]:
    """Return threads that put each rank's report into the inbox."""
    threads = []
    for k, channel in enumerate(group.channels):
        threads.append(
            threading.Thread(
                target=_follow,
                args=(k, channel, packed, inbox),
                name=f"paceline-rank-{k}",
                daemon=True,
            )
        )
        threads[-1].start()
    return threads


def _collect(n: int, inbox: queue.SimpleQueue[_Report]) -> list[_Report]:
    """Return the reports of n ranks, or of some where one of them says what failed."""
    reports: list[_Report] = []
    seconds = None
    while len(reports) < n:
        try:
            report = inbox.get(timeout=seconds)
        except queue.Empty:
            break
        reports.append(report)
        if report.result is None:
            if not report.is_consequence:
                break
            seconds = CAUSE_SECONDS
    return reports


def _follow(
    k: int,
    channel: _native.Channel,
    packed: bytes,
    inbox: queue.SimpleQueue[_Report],
) -> None:
    """Have a rank make its call, and report on it; for a thread of its own."""
    try:
        kind, payload, _, _ = channel.wait(copy=True)
        if kind != worker_main.KIND_ERROR:
            channel.post(rank.KIND_CALL, packed, [])
            kind, payload, _, _ = channel.wait(copy=True)
        now = time.monotonic()
        if kind == rank.KIND_RESULT:
            channel.post(worker_main.KIND_QUIT, b"", [])
            inbox.put(_Report(k, now, result=payload))
        elif kind == rank.KIND_FAILED:
            failure = pickle.loads(payload)
            inbox.put(_Report(k, failure.time, failure=failure))
        else:
            inbox.put(_Report(k, now, failure=Failure(payload, now, False)))
    except Exception as error:  # PeerError: its process has ended, or was ended
        inbox.put(_Report(k, time.monotonic(), words=str(error)))


# ---- what failed --------------------------------------------------------------------


def _raise(report: _Report, n: int) -> None:
    """Raise RankError for a rank that failed."""
    who = f"rank {report.rank} of {n}"
    if report.failure is None:
        raise RankError(f"{who} ended early: {report.words}", report.rank)
    original, name, text = _errors.unpack_original(report.failure.packed)
    message = f"{who} raised {name}.\nOriginal {text}"
    raise RankError(message, report.rank) from original


def cell_sources() -> dict[str, Any]:
    """Return the sources of code that has no file, as ``linecache`` holds them."""
    return {
        name: entry
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }
