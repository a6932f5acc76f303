"""Runs Python tests in forks of a process that has imported what is slow to import.

    python tests/mutation/forked_tests.py ROOT SITE

reads lines of JSON, each a list of tests and the seconds that tests have taken before,
and answers each with a line: seconds and functions by test, and the tests that failed.
Tests are those of the tree ROOT, and the package is the one in SITE;
they run from the quickest on until one fails; all, where they have not run before.
Functions are those that a test has
called then of the package's sources that are mutated: "engine.py close".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  # imported for the forks
import pytest
import torch  # noqa: F401

# A mutant may hang: what a test, and all, may take, and five times what they took.
SECONDS_A_TEST = 20
SECONDS = 60
UNKNOWN = 300  # of a test that has not run before


class Watch:
    """Notes how long each test takes, and the first that fails; sorts them by that."""

    def __init__(self, known: dict[str, float], found: Any) -> None:
        self._known, self._found = known, found
        self._called: set[str] = set()
        if not known:
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def _trace(self, frame: Any, *_: Any) -> None:
        path, _, name = frame.f_code.co_filename.rpartition("/")
        if path.endswith("/paceline/_dp/gpus"):
            self._called.add(f"{name} {frame.f_code.co_name}")

    def _tell(self, **what: Any) -> None:
        self._found.write(json.dumps(what) + "\n")
        self._found.flush()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._known.get(item.nodeid, 0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        def give_up(*_: Any) -> None:
            self._tell(failed=item.nodeid)
            os._exit(1)

        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(SECONDS_A_TEST + int(5 * self._known.get(item.nodeid, UNKNOWN)))
        self._called.clear()
        begin = time.monotonic()
        result = yield
        signal.alarm(0)
        seconds = time.monotonic() - begin
        self._tell(test=item.nodeid, seconds=seconds, called=sorted(self._called))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell(failed=report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # the mutant cannot be imported
            self._tell(failed=report.nodeid)


def _run(tests: list[str], known: dict[str, float], site: str, found: Path) -> None:
    """Run tests in this process, and end it."""
    os.setpgid(0, 0)
    sys.path.insert(0, site)
    os.environ["PYTHONPATH"] = site  # of what the tests start
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    with found.open("w") as file:
        options = ["-x"] if known else []
        options += ["-q", "-p", "no:cacheprovider", *tests]
        status = pytest.main(options, plugins=[Watch(known, file)])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            file.write(json.dumps({"failed": tests[0]}) + "\n")
    os._exit(0)


def _wait(child: int, seconds: float) -> bool:
    """Wait for the end of a process; end it, and all that it started, when it is late.

    Tell whether it ended by itself, and well.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0] == child:
            return True
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main(root: str, site: str) -> None:
    """Answer each line."""
    os.chdir(root)
    sys.dont_write_bytecode = True
    found = Path(root) / "build/found.jsonl"
    for line in sys.stdin:
        tests, known = json.loads(line)
        found.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            _run(tests, known, site, found)
        is_ended = _wait(child, SECONDS + 5 * sum(known.values()) if known else 3600)
        told = [json.loads(text) for text in found.read_text().splitlines()]
        runs = {
            one["test"]: [one["seconds"], one["called"]]
            for one in told
            if "test" in one
        }
        failed = [one["failed"] for one in told if "failed" in one]
        if not is_ended and not failed:
            failed = [tests[0]]
        print(json.dumps([runs, failed]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
