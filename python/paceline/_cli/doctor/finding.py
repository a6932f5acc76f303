"""What a check is, and what it finds."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

MIB, GIB = 1 << 20, 1 << 30
FAILED = "The check itself failed: the message says at what."


class Status(str, enum.Enum):
    """How well it is: what the JSON object says."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """What a check says of the machine.

    Attributes
    ----------
    status : Status
    found : str
        What is there.
    advice : str
        What it means, and what to do; may be empty where all is well.
    """

    status: Status
    found: str
    advice: str = ""


class BlockedError(Exception):
    """A check cannot look, for a reason that another check finds."""


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes
    ----------
    name : str
        What the output and the JSON object call it.
    look : callable
        Reads the machine and judges; what it raises is a problem.
    seconds : float
        How long it may take.
    hint : str
        What to do where it crashes or takes longer.
    """

    name: str
    look: Callable[[], Finding]
    seconds: float = 20.0
    hint: str = FAILED

    def run(self) -> Finding:
        """Look; an exception is a problem."""
        try:
            return self.look()
        except KeyboardInterrupt:
            raise
        except BlockedError as error:
            return warning(f"not looked at: {error}", "Mend that first.")
        except BaseException as error:  # SystemExit, too, from a module's import
            return problem(describe(error), FAILED)


def ok(found: str, advice: str = "") -> Finding:
    """Return a finding that all is well."""
    return Finding(Status.OK, found, advice)


def warning(found: str, advice: str) -> Finding:
    """Return a finding of what makes training slower, or fail in some cases."""
    return Finding(Status.WARNING, found, advice)


def problem(found: str, advice: str) -> Finding:
    """Return a finding of what does not work."""
    return Finding(Status.PROBLEM, found, advice)


def describe(error: BaseException) -> str:
    """Return an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def size(n_bytes: float) -> str:
    """Return a number of bytes as people write it."""
    if n_bytes >= GIB:
        return f"{n_bytes / GIB:.3g} GiB"
    return f"{n_bytes / MIB:.3g} MiB"


def count(n: float, noun: str) -> str:
    """Return "1 core", "2 cores", "1.5 cores"."""
    return f"{n:.3g} {noun}" if n == 1 else f"{n:.3g} {noun}s"
