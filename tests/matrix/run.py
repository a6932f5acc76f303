"""Run the tests with several versions of Python and torch, and write a table.

    python tests/matrix/run.py             every row; `make matrix` is this
    python tests/matrix/run.py 3.13        one row
    python tests/matrix/run.py --part parity/ddp --part unit 3.10
    python tests/matrix/run.py --torch 2.14.1 3.13 -- tests/unit -k bucket

A row is a Python, found on PATH or in pyenv, and a torch.  If the Python is not
installed, the row is skipped with a message.  `make` installs each row into
build/matrix/<Python>, as it does .venv; the JUnit file of each part of the suite is
kept there.  Arguments after `--` go to pytest, and run instead of the parts.

build/matrix/table.md lists all parts that have run, in this run or an earlier one;
docs/versions.md has a copy of it.  Exits with 1 if a test has failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "release"))
from wheels import find_pythons  # noqa: E402

WORK = ROOT / "build" / "matrix"

# The oldest of each that we support, some between, the newest; `t`: without a GIL.
ROWS = {
    "3.10": "2.4.1",
    "3.12": "2.8.0",
    "3.13": "2.14.1",
    "3.15": "2.15.0",
    "3.14t": "2.15.0",
}

# The folders of tests/ to run, each in a separate pytest.
PARTS = ["clients", "ranks", "parity/ddp", "parity/dp", "parity/upstream", "unit"]

HEAD = """\
| Python | torch | of `tests/` | passed | failed | skipped |
| --- | --- | --- | --- | --- | --- |
"""


@dataclass
class Result:
    """The result of a row or of one of its parts."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, other: Result) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def say(text: str) -> None:
    print(text, flush=True)


# ---- a row ---------------------------------------------------------------------------


def install(name: str, python: Path, torch: str) -> Path | None:
    """Make the row's environment; return its Python, or None if make fails."""
    folder = WORK / name
    have = folder / "torch.txt"
    if have.exists() and have.read_text() != torch:
        shutil.rmtree(folder)
    words = [f"PYTHON={python}", f"TORCH={torch}", f"VENV={folder.relative_to(ROOT)}"]
    environment = {**os.environ, "PACELINE_WERROR": "1"}
    environment.pop("MAKEFLAGS", None)  # set by the make that runs this
    made = subprocess.run(["make", *words, "install"], cwd=ROOT, env=environment)
    if made.returncode != 0:
        return None
    have.write_text(torch)
    return folder / "bin" / "python"


def versions(python: Path) -> tuple[str, str]:
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    words = subprocess.run(
        [python, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.split()
    return words[0], words[1]


def reason_of(message: str) -> str:
    """Return why a test was skipped, without the parts that differ between tests."""
    words = message.partition(" does not pass it: ")  # cuts the output
    return re.sub(r"/\S*/", "", " ".join("".join(words[:2]).split())).replace(
        "|", "\\|"
    )


def cases(junit: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the outcome and the reason of each test in a JUnit file."""
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed", ""
        elif skip is not None:
            yield name, "skipped", reason_of(skip.get("message", ""))
        else:
            yield name, "passed", ""


def read(junit: Path) -> Result:
    result = Result()
    for name, outcome, reason in cases(junit):
        if outcome == "failed":
            result.failed.append(name)
        elif outcome == "skipped":
            result.skipped[reason] += 1
        else:
            result.passed += 1
    return result


def junit_of(name: str, part: str) -> Path:
    return WORK / name / f"{part.replace('/', '-')}.xml"


def run_pytest(python: Path, junit: Path, words: list[str]) -> bool:
    """Run tests; return whether all have passed.

    The JUnit file is kept if pytest has finished.
    """
    junit.unlink(missing_ok=True)
    flags = ["-n", os.environ.get("JOBS", "2"), "--dist", "loadfile"]
    flags += ["--no-loadscope-reorder", "--max-worker-restart=0", f"--junitxml={junit}"]
    ended = subprocess.run([python, "-m", "pytest", "-q", *flags, *words], cwd=ROOT)
    if ended.returncode not in {0, 1}:
        say(f"pytest ended with status {ended.returncode}")
        junit.unlink(missing_ok=True)
    return ended.returncode == 0


def run_row(name: str, torch: str, parts: list[str], words: list[str]) -> bool:
    """Install a row, run its parts or given tests; return whether all passed."""
    found = find_pythons().get(name)
    if found is None:
        say(f"Skipped: no python{name} here.")
        return True
    python = install(name, found, torch)
    if python is None:
        say(f"{name}: torch {torch} or Paceline cannot be installed")
        return False
    say("==== Python {}, torch {}".format(*versions(python)))
    if words:
        return run_pytest(python, WORK / f"{name}.xml", words)
    passed = [run_pytest(python, junit_of(name, p), [f"tests/{p}"]) for p in parts]
    return all(passed)


# ---- the table -----------------------------------------------------------------------


def table() -> str:
    text, results = HEAD, {}
    for name in ROWS:
        ran = [part for part in PARTS if junit_of(name, part).exists()]
        if not ran:
            continue
        result = results[name] = Result()
        for part in ran:
            result.add(read(junit_of(name, part)))
        python, torch = versions(WORK / name / "bin" / "python")
        what = "all" if ran == PARTS else ", ".join(ran)
        counts = [result.passed, len(result.failed), result.skipped.total()]
        cells = [python + name[4:], torch, what, *map(str, counts)]
        text += f"| {' | '.join(cells)} |\n"
    for name, result in results.items():
        if result.failed:
            text += f"\n## Failed with {name}\n\n"
            text += "".join(f"- `{test}`\n" for test in sorted(result.failed))
    reasons = sorted({reason for r in results.values() for reason in r.skipped})
    if reasons:
        text += "\n## Skipped\n\n"
        text += f"| why | {' | '.join(results)} |\n| --- |{' --- |' * len(results)}\n"
        for reason in reasons:
            counts = [r.skipped[reason] for r in results.values()]
            text += f"| {reason} | {' | '.join(map(str, counts))} |\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--torch", help="a torch version for all rows")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    chosen = parser.parse_args(words[:cut])
    unknown = set(chosen.rows) - set(ROWS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(ROWS)}")
    names = chosen.rows or list(ROWS)
    given = words[cut + 1 :]
    parts = chosen.part or PARTS
    WORK.mkdir(parents=True, exist_ok=True)
    passed = [run_row(n, chosen.torch or ROWS[n], parts, given) for n in names]
    if not given:
        (WORK / "table.md").write_text(table(), encoding="utf-8")
        say(table())
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
