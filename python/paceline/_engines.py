"""What runs the replicas of a DataParallel, and how it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from paceline._shared import reason_to_stay
from paceline._threads import ThreadEngine

if TYPE_CHECKING:
    from paceline import _native
    from paceline._dp import DataParallel

NAMES = ("auto", "process", "thread")


class Engine(Protocol):
    """What runs the replicas.

    Attributes
    ----------
    name : str
        As the user gives it.
    n_replicas : int
        How many it is made for; 0: any number.
    lock : context manager
        Held by who calls :meth:`run` or :meth:`run_lists`, until the outputs are
        gathered: they may lie in memory that the next forward overwrites.
    """

    name: str
    n_replicas: int

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def run(self, owner: DataParallel, scattered: _native.Scattered) -> list[Any]:
        """Return the outputs of the replicas, in order."""

    def run_lists(
        self, owner: DataParallel, inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of the replicas, each given its arguments."""

    def close(self) -> None:
        """Let go of threads and processes."""


class Outputs(list[Any]):
    """The replicas' outputs, and how many rows each had: what gather goes by."""

    def __init__(self, outputs: Sequence[Any], sizes: tuple[int, ...] | None) -> None:
        super().__init__(outputs)
        self.sizes = sizes


def choose(owner: DataParallel, asked: str) -> tuple[str, str]:
    """Return the name of the engine for a wrapper, and a sentence that says why."""
    if len(owner.device_ids) < 2:
        return "none", owner._alone_because
    if asked != "auto":
        return asked, f"engine={asked!r} was given"
    obstacle = _no_process_because(owner)
    if obstacle is not None:
        return "thread", obstacle
    return "process", "the model can travel to processes of its own"


def _no_process_because(owner: DataParallel) -> str | None:
    """Return what speaks against worker processes for this wrapper, or None."""
    for name in ("replicate", "parallel_apply"):
        if name in owner._overridden:
            return f"{type(owner).__name__} has a {name}() of its own"
    return reason_to_stay(owner.module)


def make(name: str, owner: DataParallel) -> Engine:
    """Return a new engine of that name for a wrapper."""
    if name == "process":
        from paceline._process import ProcessEngine

        return ProcessEngine(owner)
    return ThreadEngine()
