"""A check of ``paceline doctor``, and its finding."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass

MIB, GIB = 1 << 20, 1 << 30
FAILED = "The check itself failed: see the message."


class Status(str, enum.Enum):
    """The status of a finding, as in the JSON object."""

    OK = "ok"
    WARNING = "warning"  # training is slower, or fails in some cases
    PROBLEM = "problem"  # something does not work


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    status: Status
    found: str
    advice: str = ""  # what it means, and what to do; may be empty if all is well


ok = functools.partial(Finding, Status.OK)
warning = functools.partial(Finding, Status.WARNING)
problem = functools.partial(Finding, Status.PROBLEM)


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str  # what the output and the JSON object call it
    look: Callable[[], Finding]  # reads the machine and judges
    hint: str = FAILED  # what to do if it crashes or hangs
    needs: str = ""  # the check without whose success this one is skipped


def describe(error: BaseException) -> str:
    """Return an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def size(n_bytes: float) -> str:
    """Return a number of bytes in MiB or GiB."""
    if n_bytes >= GIB:
        return f"{n_bytes / GIB:.3g} GiB"
    return f"{n_bytes / MIB:.3g} MiB"


def count(n: float, noun: str) -> str:
    """Return "1 core", "2 cores", "1.5 cores"."""
    return f"{n:.3g} {noun}" if n == 1 else f"{n:.3g} {noun}s"
