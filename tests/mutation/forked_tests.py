"""Run Python tests in forks of a process that has imported the slow modules.

    python tests/mutation/forked_tests.py ROOT SITE FILE...

imports the files and reads lines of JSON, each with a mutant's number, tests, the
seconds that tests took before, and whether to stop at the first failure.  It answers
each with a line: the seconds and the reached mutants by test, and the tests that
failed.  Tests are from the tree ROOT, and the package is from SITE, with all mutants
built in.  PL_MUTANTS names the file that selects the active mutant.  One server forks
the ranks of all tests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  # imported for the forks
import pytest
import switch
import torch
import torch._dynamo

# A mutant may hang: limits for a test and for all, beside five times their usual time.
SECONDS_A_TEST = 20
SECONDS = 60
UNKNOWN = 300  # for a test that has not run before


class Watch:
    """Records each test's time, the mutants that it reaches, and failures."""

    def __init__(self, request: dict[str, Any], found: Any) -> None:
        self._mutant, self._known = request["mutant"], request["known"]
        self._tests, self._found = set(request["tests"]), found

    def _tell(self, **what: Any) -> None:
        self._found.write(json.dumps(what) + "\n")
        self._found.flush()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort files by their tests' time; tests of one file share fixtures."""
        if self._known:
            items[:] = [item for item in items if item.nodeid in self._tests]
        takes: dict[str, float] = {}
        for item in items:
            path = str(item.path)
            takes[path] = takes.get(path, 0) + self._known.get(item.nodeid, 0)
        items.sort(key=lambda item: takes[str(item.path)])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        def give_up(*_: Any) -> None:
            self._tell(failed=item.nodeid)
            if is_late:
                os._exit(1)
            is_late.append(True)
            signal.alarm(10)
            raise TimeoutError(item.nodeid)  # this also ends the ranks

        is_late: list[bool] = []
        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(SECONDS_A_TEST + int(5 * self._known.get(item.nodeid, UNKNOWN)))
        self._tell(begun=item.nodeid)
        switch.turn_on(self._mutant)
        begin = time.monotonic()
        result = yield
        signal.alarm(0)
        seconds = round(time.monotonic() - begin, 3)
        self._tell(test=item.nodeid, seconds=seconds, reached=switch.reached())
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell(failed=report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(failed=report.nodeid)


def _run(request: dict[str, Any], found: Path) -> None:
    os.setpgid(0, 0)
    with found.with_suffix(".said").open("w") as said:
        for fd in (1, 2):
            os.dup2(said.fileno(), fd)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    with found.open("w") as file:
        watch = Watch(request, file)
        files = dict.fromkeys(test.partition("::")[0] for test in request["tests"])
        options = ["-x"] if request["first"] else []
        options += ["-q", "--tb=line", "-p", "no:cacheprovider", *files]
        status = pytest.main(options, plugins=[watch])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            watch._tell(failed=request["tests"][0])
    os._exit(0)


def _wait(child: int, seconds: float) -> bool:
    """Wait for the end of a process; if it is late, end it and its children.

    Return whether it ended by itself and without an error.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended == child:
            return status == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def answer(request: dict[str, Any], found: Path) -> list[Any]:
    """Run tests in a fork; return the facts about each, and the failures."""
    found.write_text("")
    child = os.fork()
    if child == 0:
        _run(request, found)
    known = request["known"]
    takes = sum(known.get(test, 0) for test in request["tests"])
    is_ended = _wait(child, SECONDS + 5 * takes if known else 3600)
    switch.turn_on(0)
    told = [json.loads(text) for text in found.read_text().splitlines()]
    runs = {
        one["test"]: [one["seconds"], one["reached"]] for one in told if "test" in one
    }
    failed = dict.fromkeys(one["failed"] for one in told if "failed" in one)
    if not is_ended:  # it died by a signal, or was late
        begun = [one["begun"] for one in told if "begun" in one]
        failed[begun[-1] if begun else request["tests"][0]] = None
    return [runs, list(failed)]


def _import_all(root: str, site: str, files: list[str]) -> None:
    """Import the package with mutants, and the tests; start the server of ranks."""
    os.chdir(root)
    sys.path[:0] = [site, str(Path(root, "tests"))]
    os.environ["PYTHONPATH"] = site  # for processes that the tests start
    import paceline._ddp.distributed
    from support import ranks

    assert paceline._ddp.distributed.__file__.startswith(site)
    torch.set_num_threads(1)  # a fork has no pool of threads
    if files:
        pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *files])
        os.environ.pop("PACELINE_RECORDER", None)  # conftest.py's
        ranks.preload(*(Path(f).stem for f in files if "ddp" in f))
    ranks._context()
    server = ranks.forkserver
    server.ensure_running = server._forkserver.ensure_running = lambda: None


def main(root: str, site: str, *files: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all(root, site, list(files))
    found = Path(os.environ["PL_MUTANTS"]).with_suffix(".jsonl")
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), found)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
