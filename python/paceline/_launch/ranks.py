"""The caller's side of :func:`paceline.launch`: start ranks, wait, report failures."""

from __future__ import annotations

import linecache
import os
import pickle
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from paceline import _environment
from paceline._launch import payloads, rank
from paceline._launch.messages import Call, Failure, Result, unpack_exception
from paceline._launch.processes import Processes

_ADDRESS = "127.0.0.1"
CAUSE_SECONDS = 5.0
"""How long to wait for the cause, if a rank failed because another one ended."""


class RankError(RuntimeError):
    """A rank of :func:`paceline.launch` failed.

    Its cause (``__cause__``) is the rank's own exception, if that could be pickled;
    the message ends with the rank's traceback.

    Attributes
    ----------
    rank : int
        The rank that failed first, or whose result cannot be pickled or unpickled.
    results : dict
        What the ranks returned that had returned by then, by rank.

    Examples
    --------
    >>> import paceline
    >>> def fail():
    ...     raise ValueError("no data")
    >>> try:
    ...     paceline.launch(fail, 1)
    ... except paceline.RankError as error:
    ...     print(error.rank, repr(error.__cause__))
    0 ValueError('no data')
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank, self.results = rank, dict[int, Any]()


RankError.__module__ = "paceline"


@dataclass(frozen=True)
class _Report:
    """How a rank has ended: with a result, a failure, or by the end of its process."""

    rank: int
    time: float
    result: Result | None = None
    failure: Failure | None = None
    words: str = ""
    lost: BaseException | None = None  # why the result cannot be used

    @property
    def is_consequence(self) -> bool:
        return self.failure is not None and self.failure.is_consequence


def run(n: int, call: Call) -> list[Any]:
    """Make a call on each of n new ranks; return the results, by rank.

    If ranks fail, raise RankError from the exception of the first one.
    """
    with _started(n, call) as processes:
        reports = _collect(n, processes.wait)
        failed = [report for report in reports if report.result is None]
        if not failed:
            processes.wait_until_ended()
    results: dict[int, Any] = {}
    for each in sorted(reports, key=lambda each: each.rank):
        try:
            if each.result is not None:
                results[each.rank] = payloads.unpack_result(each.result)
        except (Exception, SystemExit) as error:  # any: it is the user's object
            failed.append(replace(each, lost=error))
    if failed:
        # A rank that failed counts before a result that was lost.
        raised = [each for each in failed if each.lost is None] or failed
        first = min(raised, key=lambda each: (each.is_consequence, each.time))
        _raise(first, n, results)
    return [*results.values()]


@contextmanager
def _started(n: int, call: Call) -> Iterator[Processes]:
    """Start the ranks and the store at which they meet; end both afterwards."""
    store = _make_store()
    try:
        with closing(Processes()) as processes:
            processes.start(call, _environs(n, store.port))
            yield processes
    finally:
        del store  # closes the port, even if a traceback keeps this frame


def _make_store() -> Any:
    """Return a store that listens on the loopback; torch's own socket would on all."""
    listener = socket.create_server((_ADDRESS, 0))
    return dist.TCPStore(  # type: ignore[attr-defined]
        _ADDRESS,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
        use_libuv=False,  # with it, torch 2.4 takes no socket
    )


def _environs(n: int, port: int) -> list[dict[str, str]]:
    """Return the variables of each rank besides the caller's."""
    common = {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        _environment.SECRET: secrets.token_hex(32),
        **rank.OWN_VARIABLES,
    }
    return [{**common, "RANK": str(k), "LOCAL_RANK": str(k)} for k in range(n)]


# ---- waiting ------------------------------------------------------------------------


def _collect(
    n: int, wait: Callable[[float | None], tuple[int, bytes | str] | None]
) -> list[_Report]:
    """Return the reports of n ranks, or of fewer if one shows the cause of a failure.

    `wait` is ``Processes.wait``.
    """
    reports: list[_Report] = []
    seconds = None
    while len(reports) < n and (outcome := wait(seconds)) is not None:
        reports.append(_report(*outcome))
        if reports[-1].result is None:
            if not reports[-1].is_consequence:
                break
            seconds = CAUSE_SECONDS
    return reports


def _report(rank: int, outcome: bytes | str) -> _Report:
    now = time.monotonic()
    if isinstance(outcome, str):
        return _Report(rank, now, words=outcome)
    answer = pickle.loads(outcome)
    if isinstance(answer, Failure):
        return _Report(rank, answer.time, failure=answer)
    return _Report(rank, now, result=answer)


# ---- what failed --------------------------------------------------------------------


def _raise(report: _Report, n: int, results: dict[int, Any]) -> None:
    original, who = report.lost, f"rank {report.rank} of {n}"
    if report.result is not None:
        name = report.result.name
        message = f"{who}: {name} cannot be sent to the caller: {original}"
    elif report.failure is None:
        message = f"{who} ended early: {report.words}"
    else:
        original, name, text = unpack_exception(report.failure.packed)
        message = f"{who} raised {name}.\nOriginal {text}"
    error = RankError(message, report.rank)
    error.results = results
    raise error from original


def cell_sources() -> dict[str, Any]:
    """Return the sources of code that has no file, as ``linecache`` holds them."""
    return {
        name: entry
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }
