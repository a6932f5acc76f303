"""The command: run the checks, print their findings, and end with a verdict."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import paceline
from paceline._cli.doctor import apart, gpus, links, machine
from paceline._cli.doctor.finding import Check, Finding, Status, count
from paceline._cli.options import Parser
from paceline._recorder import printable

DESCRIPTION = """\
Checks what training with Paceline uses on this machine.  Each finding is ok, warning or
problem, with what it means and what to do.  The command changes nothing and needs no
root."""
EPILOGUE = "Exit status: 0 if there is no problem, warnings allowed; 1 if there is one."

_DRIVER = "CUDA's driver crashes or hangs: see whether `nvidia-smi` works, and dmesg."
_NO_LINKS = "Ranks on this machine would hang: see dmesg, and the container's limits."
_BROKEN_TORCH = "Importing torch crashes or hangs: reinstall torch."
_BROKEN = "The extension is broken: reinstall Paceline."
CHECKS = (
    Check("extension", machine.look_extension, _BROKEN),
    Check("environment", machine.look_environment),
    Check("dev_shm", machine.look_dev_shm),
    Check("links", links.look_links, _NO_LINKS, needs="extension"),
    Check("torch", machine.look_torch, _BROKEN_TORCH, needs="extension"),
    Check("cores", machine.look_cores, _BROKEN_TORCH, needs="torch"),
    Check("driver", gpus.look_driver, _DRIVER, needs="extension"),
    Check("gpus", gpus.look_gpus, _DRIVER, needs="torch"),
    Check("gpu_links", gpus.look_gpu_links, gpus.COPIES_HANG, needs="torch"),
)

_COLOURS = {Status.OK: "32", Status.WARNING: "33", Status.PROBLEM: "1;31"}
_STDOUT, _STDERR = 1, 2
_MIN_WIDTH, _MAX_WIDTH = 60, 100
_NAME_WIDTH = max(len(check.name) for check in CHECKS)
_INDENT = " " * (len("problem") + 2 + _NAME_WIDTH + 2)


def main(arguments: Sequence[str], program: str) -> int:
    """Run ``doctor`` with its arguments; return the exit status."""
    # Pipes to other processes must not get the numbers of closed standard streams.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = os.fdopen(_STDOUT, "w", closefd=False)
    parser = Parser(f"{program} doctor", DESCRIPTION, EPILOGUE)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object in place of text"
    )
    options = parser.read(arguments)
    findings = zip(CHECKS, apart.run(CHECKS), strict=True)
    found = _show_json(findings) if options.json else _show_text(findings)
    return int(any(finding.status is Status.PROBLEM for finding in found))


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line of the output."""
    n_problems = sum(finding.status is Status.PROBLEM for finding in findings)
    n_warnings = sum(finding.status is Status.WARNING for finding in findings)
    counted = count(n_warnings, "warning")
    if n_problems:
        also = f" and {counted}" if n_warnings else ""
        return f"This machine has {count(n_problems, 'problem')}{also}."
    return f"Paceline can train here, with {counted}." if n_warnings else "All is well."


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
        mark + printable(" ".join(text.split())),
        width - len(_INDENT),
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _show_json(findings: Iterator[tuple[Check, Finding]]) -> list[Finding]:
    rows = [(check.name, finding) for check, finding in findings]
    found = [finding for _, finding in rows]
    statuses = [finding.status for finding in found]
    report = {
        "version": paceline.__version__,
        "status": max(statuses, key=list(Status).index),
        "verdict": verdict(found),
        "checks": [{"name": name, **asdict(finding)} for name, finding in rows],
    }
    print(json.dumps(report, indent=2))
    return found
