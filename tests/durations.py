"""Prints where the tests' seconds go, for the table in README.md beside this file.

    make test && python tests/durations.py

It reads what `make test` leaves: pytest's JUnit file, and each C program's seconds.
Seconds are those of a worker; two work side by side.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
SUFFIXES = {".py", ".c", ".cpp", ".h", ".sh", ".cu"}
N_SLOWEST = 5


def seconds_of_python() -> dict[Path, float]:
    """Seconds by file, setup and teardown with them."""
    found: dict[Path, float] = defaultdict(float)
    for case in ElementTree.parse(BUILD / "tests.xml").iter("testcase"):
        path = Path(*case.get("classname", "").split("."))
        while path.name and not (ROOT / path).with_suffix(".py").exists():
            path = path.parent  # a class of tests
        if path.name:
            found[path.with_suffix(".py")] += float(case.get("time", "0"))
    return found


def seconds_of_c() -> dict[Path, float]:
    found = {}
    text = (BUILD / "c-tests.txt").read_text()
    for name, seconds in re.findall(r"^-- \S+/(test_\w+) \((\d+) s\)", text, re.M):
        found[Path("tests/c", f"{name}.c")] = float(seconds)
    return found


def lines_below(folder: Path) -> int:
    files = [f for f in folder.rglob("*") if f.suffix in SUFFIXES and f.is_file()]
    return sum(f.read_text(errors="replace").count("\n") for f in files)


def main() -> int:
    seconds = {**seconds_of_python(), **seconds_of_c()}
    by_folder: dict[str, float] = defaultdict(float)
    for path, taken in seconds.items():
        parts = path.parts[1:-1]
        by_folder["/".join(parts[:2])] += taken
    tests = ROOT / "tests"
    folders = [f for f in tests.iterdir() if f.is_dir()]
    folders += [*(tests / "parity").iterdir(), *(tests / "unit").iterdir()]
    folders = [f for f in folders if f.is_dir() and lines_below(f)]
    for folder in sorted(folders):
        name = folder.relative_to(tests).as_posix()
        print(f"| `{name}` | {lines_below(folder):,} | {by_folder.get(name, 0):.0f} |")
    print(f"\nall: {lines_below(tests):,} lines, {sum(seconds.values()):.0f} s")
    for path in sorted(seconds, key=lambda p: -seconds[p])[:N_SLOWEST]:
        print(f"{seconds[path]:7.1f} s  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
