"""The script for machines with a GPU survives parts that fail, hang or die."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import wait_until_gone
from support.programs import run_python

FOLDER = Path(__file__).parents[2] / "gpu"

# Runs a part by name, instead of part.py.
STUB = f"""
import os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {str(FOLDER)!r})
from checks import Skip, record, run_here

def skip():
    raise Skip("no such thing here")

def fail():
    raise ValueError("of no use")

def succeed():
    return {{"figure": 7, "lines": ["seven"]}}

part = sys.argv[1]
print("part", part, flush=True)
def see():
    # The JSON holds the check before this one while the part still runs.
    [path] = Path(os.environ["OUT"]).glob("*.json")
    for _ in range(600):
        if "early" in path.read_text():
            return
        time.sleep(0.1)
    raise LookupError("an earlier check is not written down")

if part == "first":
    run_here([("early", succeed), ("seen_in_the_file", see)])
elif part == "build":
    is_missing = "NO_PACKAGE" in os.environ
    run_here([("imports", fail if is_missing else succeed), ("skipped_check", skip)])
elif part == "kernels":
    sys.exit(not run_here([("good_check", succeed), ("bad_check", fail)]))
elif part == "alone":
    record("before_the_end", "passed", 0)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(600)
elif part == "nccl":
    record("before_death", "passed", 0)
    os.kill(os.getpid(), 9)
elif part == "memory":
    run_here([("good_check", succeed)])
"""

MAIN = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(FOLDER)!r})
import main
sys.exit(main.main(sys.argv[2:], Path(sys.argv[1])))
"""


class Run:
    def __init__(self, folder: Path, *words: str, env: Any = None) -> None:
        stub = folder / "stub.py"
        stub.write_text(STUB)
        env = {**os.environ, "OUT": str(folder / "out"), **(env or {})}
        self.done = run_python(MAIN, stub, *words, env=env, check=False)
        self.output = self.done.stdout
        files = sorted((folder / "out").iterdir())
        assert [path.suffix for path in files] == [".json", ".txt"], self.done.stderr
        self.results: dict[str, Any] = json.loads(files[0].read_text())
        self.text = files[1].read_text()

    def part(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.results["parts"][name]
        return found

    def checks(self, name: str) -> dict[str, str]:
        return {row["check"]: row["result"] for row in self.part(name)["checks"]}


def test_parts_that_pass_give_status_zero(tmp_path):
    run = Run(tmp_path, "memory")
    assert run.done.returncode == 0, run.output
    assert run.checks("build")["imports"] == "passed"
    assert run.checks("build")["skipped_check"] == "skipped"
    assert run.part("memory")["result"] == "passed"
    assert run.part("memory")["checks"][0]["figures"] == {"figure": 7}
    assert "seven" in run.text
    assert run.results["machine"]["packages"]["torch"] != "missing"


def test_what_is_found_first_needs_no_build_and_is_written_at_once(tmp_path):
    run = Run(tmp_path, "first")
    assert run.done.returncode == 0, run.output
    assert list(run.results["parts"]) == ["first"]
    assert run.checks("first") == {"early": "passed", "seen_in_the_file": "passed"}


def test_a_failed_check_is_named_and_kept_and_no_matter_of_a_later_call(tmp_path):
    run = Run(tmp_path, "kernels")
    assert run.done.returncode == 1
    assert run.checks("kernels") == {"good_check": "passed", "bad_check": "failed"}
    summary = run.output.rpartition("==== summary")[2]
    assert "failed: bad_check: ValueError: of no use" in summary
    assert "still unanswered:\n    first " in summary
    run = Run(tmp_path, "memory")
    assert run.done.returncode == 0, "only parts of this call count"
    assert run.part("kernels")["result"] == "failed"
    assert run.part("memory")["result"] == "passed"


def test_parts_that_hang_or_die_are_ended_and_leave_what_they_have_found(tmp_path):
    run = Run(tmp_path, "--limit", "2", "alone", "nccl", "memory")
    assert run.done.returncode == 1
    assert run.part("alone")["why"] == "stopped after 2 s"
    assert run.checks("alone") == {"before_the_end": "passed"}
    [line] = [x for x in run.text.splitlines() if x.startswith("child ")]
    assert wait_until_gone([int(line.split()[1])], 5.0) == []
    assert run.part("nccl")["why"] == "ended with status -9"
    assert run.checks("nccl") == {"before_death": "passed"}
    assert run.part("memory")["result"] == "passed"


def test_without_a_package_what_needs_none_still_runs(tmp_path):
    run = Run(tmp_path, "kernels", "memory", env={"NO_PACKAGE": "1"})
    assert run.done.returncode == 1
    assert run.part("memory")["why"] == "there is no build"
    assert run.checks("kernels")["good_check"] == "passed"


def test_what_no_time_is_left_for_is_named(tmp_path):
    run = Run(tmp_path, "--within", "5", "memory")
    assert run.done.returncode == 1
    left = {"result": "not run", "why": "no time was left", "checks": []}
    assert run.part("memory") == left


def test_an_unknown_part_is_refused_with_the_names_of_all(tmp_path):
    done = subprocess.run(
        [FOLDER / "run.sh", "dance"],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no part 'dance'" in done.stderr
    assert "correct" in done.stderr


needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("make") is None,
    reason="there is no gcc, or no make",
)


LAYOUT = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import kernels_library
print(kernels_library.layout())
"""


@needs_gcc
def test_what_shows_the_kernels_to_ctypes_fits_their_headers():
    root = FOLDER.parents[1]
    flags = (root / "csrc/compile_flags.txt").read_text().split()
    source = FOLDER / "shim.c"
    layout = run_python(LAYOUT).stdout.strip()
    assert "sizeof(pl_rank_ranges)" in layout
    done = subprocess.run(
        ["gcc", *flags, f"-DLAYOUT={layout}", "-Werror", "-fsyntax-only", source],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr


# Ranks without torch, instead of world.py: the test is about the code that runs them.
WORLD = """
class World:
    @classmethod
    def join(cls, rank, size, port):
        world = cls()
        world.rank, world.size = rank, size
        return world

    def run(self, check):
        return check.function(self)
"""

CHECKS = """
import os
import signal
import time
from checks import Skip, check

@check(worlds=(1, 2))
def all_goes_well(world):
    return {"ranks": world.size, "lines": ["well"]}

@check(worlds=(2,))
def tells_its_place(world):
    names = ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE")
    return {name: os.environ.get(name) for name in names}

@check(worlds=(2,))
def one_rank_fails(world):
    if world.rank == 1:
        raise LookupError("only here")

@check(worlds=(2,))
def nothing_to_do(world):
    raise Skip("of no interest")

@check(worlds=(2,), dying=(1,))
def one_rank_is_killed(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"rank": world.rank}

@check(worlds=(2,), seconds=40)
def one_rank_dies_unexpectedly(world):
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)

@check(worlds=(1,), seconds=1)
def hangs_for_ever(world):
    time.sleep(600)

@check(worlds=(2,), needs_cuda=True)
def wants_a_device(world):
    raise AssertionError
"""

SESSION = f"""
import sys, time
sys.path.insert(0, {str(FOLDER)!r})
import checks, session, stub_checks
found = checks.checks_of(stub_checks)
good = session.run_on_ranks(found, (1, 2), time.monotonic() + 100)
shared = session.share([c for c in found if c.name == "tells_its_place"])
session.run_on_ranks(shared, (2,), time.monotonic() + 100)
sys.exit(0 if good else 7)
"""


@needs_gcc
def test_checks_on_ranks_go_on_after_a_failure(tmp_path):
    (tmp_path / "stub_checks.py").write_text(CHECKS)
    (tmp_path / "stub_world.py").write_text(WORLD)
    record = tmp_path / "record"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "PACELINE_GPU_FAKE": "1",
        "PACELINE_GPU_WORLD": "stub_world",
        "PACELINE_GPU_RECORD": str(record),
    }
    done = run_python(SESSION, env=env, timeout=240, check=False)
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert {row["check"]: row["result"] for row in rows} == {
        "all_goes_well[1]": "passed",
        "hangs_for_ever[1]": "failed",
        "all_goes_well[2]": "passed",
        "tells_its_place[2]": "passed",
        "one_rank_fails[2]": "failed",
        "nothing_to_do[2]": "skipped",
        "one_rank_is_killed[2]": "passed",
        "one_rank_dies_unexpectedly[2]": "failed",
        "wants_a_device[2]": "skipped",
    }
    places = [row["figures"] for row in rows if row["check"] == "tells_its_place[2]"]
    assert places == [
        {"NCCL_HOSTID": "paceline-0", "NCCL_MULTI_RANK_GPU_ENABLE": None},
        {"NCCL_HOSTID": None, "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    ]
    found = {row["check"]: row for row in rows}
    assert found["all_goes_well[2]"]["figures"] == {"ranks": 2}
    assert "rank 1: Traceback" in found["one_rank_fails[2]"]["words"]
    assert "hangs_for_ever" in found["hangs_for_ever[1]"]["output"]
    assert done.returncode == 7, done.stdout + done.stderr


NAMES = f"""
import json, sys
sys.path[:0] = [{str(FOLDER)!r}, {str(FOLDER.parent / "bench")!r}]
import main, parts
modules = (*parts.GRADIENTS, *parts.REPLICAS, *parts.ON_RANKS["failures"][0])
modules += "check_programs", "check_rows"
names = [c.name for c in parts.checks_in(modules)]
first = f"{{parts.FIRST_ALONE}} {{parts.FIRST_TOGETHER}} {{parts.FIRST_REPLICAS}}"
print(json.dumps([names, [c.name for c in parts.named(first)]]))
"""


def test_checks_have_names_of_their_own_and_the_first_are_among_them():
    paths = os.pathsep.join(p for p in sys.path if p)
    done = run_python(NAMES, env={**os.environ, "PYTHONPATH": paths})
    names, first = json.loads(done.stdout)
    assert len(names) == len(set(names)) > 90
    assert set(first) <= set(names)


def test_simulated_devices_take_the_package_that_is_installed(tmp_path):
    run = Run(tmp_path, "--fake", "memory")
    assert run.done.returncode == 0, run.output
    assert list(run.results["parts"]) == ["memory"]
    other = tmp_path / "other"
    other.mkdir()
    assert list(Run(other, "memory").results["parts"]) == ["build", "memory"]
