"""The definition of checks, their list, and the record of their outcomes.

    @check(worlds=(1, 2), seconds=60)
    def gradients_are_means(world):
        ...                       # raises: failed.  raise Skip("why"): skipped.
        return {"figures": ...}   # or nothing; "lines" are shown in the summary

A check with `worlds` runs in worlds of these sizes (session.py); without, in the part's
own process.  `--only` searches the names of checks.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

Figures = dict[str, Any]
T = TypeVar("T")


class Skip(Exception):
    """The check cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Check:
    function: Callable[..., Figures | None]
    worlds: tuple[int, ...] = ()
    seconds: float = 60.0
    needs_cuda: bool = False
    dying: tuple[int, ...] = ()  # ranks that the check kills
    fresh: bool = False  # needs processes that have done nothing else
    env: tuple[tuple[str, str], ...] = ()  # more variables for its processes

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def module(self) -> str:
        return self.function.__module__


def check(**options: Any) -> Callable[[Callable[..., Any]], Check]:
    return lambda function: Check(function, **options)


def add(
    into: dict[str, Any], name: str, function: Callable[..., Any], **options: Any
) -> None:
    """Add a check, a row of a table, to a module by its globals."""
    function.__name__ = name  # type: ignore[attr-defined]
    function.__module__ = into["__name__"]
    into[name] = Check(function, **options)


def checks_of(module: Any) -> list[Check]:
    found = [value for value in vars(module).values() if isinstance(value, Check)]
    return list({each.name: each for each in found}.values())


def is_fake() -> bool:
    """Tell whether GPUs are those of tests/support/fake_gpus.py: a rehearsal."""
    return bool(os.environ.get("PACELINE_GPU_FAKE"))


def rehearsed(real: T, smaller: T) -> T:
    """Return a size; in a rehearsal, return the smaller one."""
    return smaller if is_fake() else real


def simulated() -> Any:
    """Return the module of simulated GPUs; a machine with a GPU may lack its tools."""
    from support import fake_gpus

    return fake_gpus


def is_quick() -> bool:
    return bool(os.environ.get("PACELINE_GPU_QUICK"))


def is_wanted(name: str) -> bool:
    return os.environ.get("PACELINE_GPU_ONLY", "") in name


def record(
    name: str, result: str, seconds: float, figures: Figures | None = None, **more: Any
) -> None:
    """Record and print an outcome; `more` has its words and output."""
    row = {"check": name, "result": result, "seconds": round(seconds, 2), **more}
    figures = dict(figures or {})
    if lines := figures.pop("lines", []):
        row["lines"] = lines
    if figures:
        row["figures"] = figures
    if path := os.environ.get("PACELINE_GPU_RECORD"):
        with open(path, "a") as file:
            file.write(json.dumps(row, default=str) + "\n")
    words = "\n".join(str(more.get(key, "")).rstrip() for key in ("words", "output"))
    words = words.strip()
    print(f"{result:<8} {seconds:7.2f} s  {name}", flush=True)
    for line in lines:
        print(f"         {line}", flush=True)
    if words:
        print("\n".join(f"    | {line}" for line in words.splitlines()), flush=True)


def run_here(checks: Iterable[tuple[str, Callable[[], Figures | None]]]) -> bool:
    good = True
    for name, function in checks:
        if not is_wanted(name):
            continue
        begin = time.monotonic()
        try:
            figures = function() or {}
        except Skip as why:
            record(name, "skipped", time.monotonic() - begin, words=str(why))
        except Exception:
            good = False
            words = traceback.format_exc()
            record(name, "failed", time.monotonic() - begin, words=words)
        else:
            record(name, "passed", time.monotonic() - begin, figures)
    return good
