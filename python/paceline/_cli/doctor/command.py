"""The command: runs the checks, prints what they find, and ends with a verdict."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

import paceline
from paceline._cli.doctor import table
from paceline._cli.doctor.apart import Probe
from paceline._cli.doctor.finding import (
    FAILED,
    Check,
    Finding,
    Status,
    describe,
    problem,
)

DESCRIPTION = """\
Looks at this machine as training with Paceline would use it, and says for each thing
what was found, what it means and what to do: ok, warning or problem.  It changes
nothing and needs no root."""
EPILOGUE = "Exit status: 0 if there is no problem, warnings allowed; 1 if there is one."

_COLOURS = {Status.OK: "32", Status.WARNING: "33", Status.PROBLEM: "1;31"}
_MIN_WIDTH, _MAX_WIDTH = 60, 100
_NAME_WIDTH = max(len(check.name) for check in table.CHECKS)
_INDENT = " " * (len("problem") + 2 + _NAME_WIDTH + 2)


def main(arguments: Sequence[str], program: str) -> int:
    """Run ``doctor`` with its arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"{program} doctor",
        description=DESCRIPTION,
        epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object in place of text"
    )
    options = parser.parse_args(arguments)
    findings = run()
    found = _show_json(findings) if options.json else _show_text(findings)
    return int(any(finding.status is Status.PROBLEM for finding in found))


def run() -> Iterator[tuple[Check, Finding]]:
    """Yield each check and its finding, as soon as there is one."""
    with Probe(table.__name__) as probe:
        for check in table.CHECKS:
            try:
                finding = probe.run(check) if check.is_apart else check.run()
            except Exception as error:  # the other checks go on
                finding = problem(describe(error), FAILED)
            yield check, finding


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line."""
    n_problems = sum(finding.status is Status.PROBLEM for finding in findings)
    n_warnings = sum(finding.status is Status.WARNING for finding in findings)
    counted = _counted(n_warnings, "warning")
    if n_problems:
        also = f" and {counted}" if n_warnings else ""
        return f"This machine has {_counted(n_problems, 'problem')}{also}."
    return f"Paceline can train here, with {counted}." if n_warnings else "All is well."


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _show_text(findings: Iterator[tuple[Check, Finding]]) -> list[Finding]:
    if isinstance(sys.stdout, io.TextIOWrapper):  # values need not be valid text
        sys.stdout.reconfigure(errors="backslashreplace")
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    columns = shutil.get_terminal_size().columns
    width = min(max(columns, _MIN_WIDTH), _MAX_WIDTH)
    found = []
    for check, finding in findings:
        found.append(finding)
        status = f"{finding.status.value:<7}"
        if is_coloured:
            status = f"\033[{_COLOURS[finding.status]}m{status}\033[0m"
        lines = _wrapped(finding.found, width)
        print(f"{status}  {check.name:<{_NAME_WIDTH}}  {lines[0]}")
        mark = "tip: " if finding.status is Status.OK else "-> "
        for line in lines[1:] + _wrapped(finding.advice, width, mark):
            print(f"{_INDENT}{line}")
        sys.stdout.flush()
    print(verdict(found))
    return found


def _wrapped(text: str, width: int, mark: str = "") -> list[str]:
    if not text and mark:
        return []
    return textwrap.wrap(
        f"{mark}{text}",
        width - len(_INDENT),
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _show_json(findings: Iterator[tuple[Check, Finding]]) -> list[Finding]:
    found, rows = [], []
    for check, finding in findings:
        found.append(finding)
        rows.append(
            {
                "name": check.name,
                "status": finding.status.value,
                "found": finding.found,
                "advice": finding.advice,
            }
        )
    statuses = [finding.status for finding in found]
    worst = max(statuses, key=list(Status).index, default=Status.OK)
    report = {
        "version": paceline.__version__,
        "status": worst.value,
        "verdict": verdict(found),
        "checks": rows,
    }
    print(json.dumps(report, indent=2))
    return found
