"""Runs the tests with other Pythons and other torches, and writes a table of it.

    python tests/matrix/run.py             every row; `make matrix` is this
    python tests/matrix/run.py 3.13        one row
    python tests/matrix/run.py --torch 2.15.0rc1 3.13 -- tests/unit -k bucket
    python tests/matrix/run.py --quick     a few minutes of one row, for .ci/run

A row is a Python, found on PATH or among pyenv's, and a torch; where that Python is
not installed the row is skipped, and says so.  `make` installs each row into
build/matrix/<Python>, as it does .venv, and what pytest has found there is read from
its JUnit file.  What follows `--` is pytest's; without it, SUITE runs.

Where SUITE ran, build/matrix/table.md is written, of this run and of the other rows'
last ones; docs/versions.md is a copy of it.  Ends with 1 where a test has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "release"))
from wheels import find_pythons  # noqa: E402

WORK = ROOT / "build" / "matrix"

# The oldest of each that we serve, one between, the newest; `t` is without the GIL.
ROWS = {"3.10": "2.4.1", "3.12": "2.8.0", "3.13": "2.14.1", "3.14t": "2.14.1"}

# The longest files first, as in the Makefile.
SUITE = ["tests/clients", "tests/ranks", "tests/parity", "tests/unit"]
# What other Pythons and torches have broken, or are likely to.
QUICK = [
    "tests/clients",
    "tests/parity/dp/test_data_parallel_changes.py",
    "tests/parity/ddp/test_gradients.py",
]
QUICK_ROWS = ["3.13", "3.12", "3.10"]

HEAD = """\
# Versions

The tests run with torch {pinned} before every change lands, and with the Pythons and
torches below by `make matrix`, which wrote this page. `make MATRIX=3.13 matrix` runs
one row; `make MATRIX=3.13 TORCH=2.15.0rc1 matrix` takes another torch, from wherever
`pip` finds it; `MATRIX_FLAGS="-- -k bucket"` runs other tests.

| Python | torch | passed | failed | skipped |
| --- | --- | --- | --- | --- |
"""


@dataclass
class Result:
    """What a row has come to: counts, or why there are none."""

    name: str
    python: str
    torch: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    why_not: str = ""


def say(text: str) -> None:
    print(text, flush=True)


# ---- a row ---------------------------------------------------------------------------


def install(name: str, python: Path, torch: str) -> Path | None:
    """Make the row's environment; return its Python, or None where make fails."""
    folder = WORK / name
    have = folder / "torch.txt"
    if have.exists() and have.read_text() != torch:
        shutil.rmtree(folder)
    words = [f"PYTHON={python}", f"TORCH={torch}", f"VENV={folder.relative_to(ROOT)}"]
    environment = {**os.environ, "PACELINE_WERROR": "1"}
    environment.pop("MAKEFLAGS", None)  # those of the make that runs this
    made = subprocess.run(["make", *words, "install"], cwd=ROOT, env=environment)
    if made.returncode != 0:
        return None
    have.write_text(torch)
    return folder / "bin" / "python"


def versions(python: Path) -> tuple[str, str]:
    """Return the versions of an environment's Python and torch, as they name them."""
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    words = subprocess.run(
        [python, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.split()
    return words[0], words[1]


def reason_of(message: str) -> str:
    """Return why a test was skipped, without what differs from test to test."""
    words = message.partition(" does not pass it: ")  # what follows is output
    return re.sub(r"/\S*/", "", " ".join("".join(words[:2]).split())).replace(
        "|", "\\|"
    )


def read(junit: Path, result: Result) -> None:
    """Count what pytest has left in its JUnit file."""
    skipped: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skip is not None:
            skipped[reason_of(skip.get("message", ""))] += 1
        else:
            result.passed += 1
    result.skipped = dict(skipped.most_common())


def run_row(name: str, torch: str, tests: list[str]) -> Result:
    """Install a row, run its tests, and return what came of it."""
    found = find_pythons().get(name)
    if found is None:
        return Result(name, name, torch, why_not=f"no python{name} here")
    python = install(name, found, torch)
    if python is None:
        return Result(name, name, torch, failed=["the installation"])
    result = Result(name, *versions(python))
    say(f"==== Python {result.python}, torch {result.torch}")
    junit = WORK / f"{name}.xml"
    junit.unlink(missing_ok=True)
    words = ["-n", os.environ.get("JOBS", "2"), "--dist", "loadfile"]
    words += ["--no-loadscope-reorder", "--max-worker-restart=0", f"--junitxml={junit}"]
    ended = subprocess.run([python, "-m", "pytest", "-q", *words, *tests], cwd=ROOT)
    if junit.exists():
        read(junit, result)
    if ended.returncode != 0 and not result.failed:
        result.failed.append(f"pytest ended with status {ended.returncode}")
    return result


# ---- the table -----------------------------------------------------------------------


def line_of(result: Result) -> str:
    if result.why_not:
        return f"| {result.python} | {result.torch} | {result.why_not} | | |\n"
    counts = [result.passed, len(result.failed), sum(result.skipped.values())]
    return f"| {' | '.join([result.python, result.torch, *map(str, counts)])} |\n"


def table(results: list[Result]) -> str:
    """Return the page: a line a row, what failed, and why tests were skipped."""
    constraints = (ROOT / "requirements" / "constraints.txt").read_text(
        encoding="utf-8"
    )
    pinned = re.search(r"^torch==(\S+)", constraints, re.MULTILINE)
    assert pinned is not None
    text = HEAD.format(pinned=pinned[1]) + "".join(map(line_of, results))
    for result in results:
        if result.failed:
            text += f"\n## Failed with {result.name}\n\n"
            text += "".join(f"- `{name}`\n" for name in sorted(result.failed))
    reasons = sorted({reason for result in results for reason in result.skipped})
    if reasons:
        names = [result.name for result in results if not result.why_not]
        text += "\n## Skipped\n\n"
        text += f"| why | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}\n"
        for reason in reasons:
            counts = [r.skipped.get(reason, 0) for r in results if not r.why_not]
            text += f"| {reason} | {' | '.join(map(str, counts))} |\n"
    return text


def write_table() -> None:
    """Write the table of the rows' last runs."""
    files = [WORK / f"{name}.json" for name in ROWS]
    results = [Result(**json.loads(f.read_text())) for f in files if f.exists()]
    (WORK / "table.md").write_text(table(results), encoding="utf-8")


def quick_row() -> list[str]:
    """Return the newest row with another Python than this one's, if there is any."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    others = [name for name in QUICK_ROWS if name != own]
    here = [name for name in others if name in find_pythons()]
    if not here:
        say(f"Skipped: none of Python {', '.join(others)} is installed here.")
    return here[:1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--torch", help="another torch than the rows'")
    parser.add_argument("--quick", action="store_true", help="one row, a few minutes")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    chosen = parser.parse_args(words[:cut])
    unknown = set(chosen.rows) - set(ROWS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(ROWS)}")
    tests = words[cut + 1 :] or (QUICK if chosen.quick else SUITE)
    names = chosen.rows or (quick_row() if chosen.quick else list(ROWS))
    WORK.mkdir(parents=True, exist_ok=True)
    results = [run_row(name, chosen.torch or ROWS[name], tests) for name in names]
    if tests is SUITE:
        for result in results:
            path = WORK / f"{result.name}.json"
            path.write_text(json.dumps(asdict(result)), encoding="utf-8")
        write_table()
    say(table(results))
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
