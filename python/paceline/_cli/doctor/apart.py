"""Run the checks in a forked process: its crash or hang is a finding.

The doctor itself imports neither torch nor the extension, so that a fork is safe.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import NoReturn

from paceline._cli.doctor.finding import (
    FAILED,
    Check,
    Finding,
    Status,
    describe,
    problem,
    warning,
)

SECONDS = 120.0
"""For each check: torch from a network's file system, the first use of eight GPUs."""
_GRACE_SECONDS = 5
_END_SECONDS = 5.0  # a driver may hold a killed process for longer
# Neither Paceline nor the driver keeps compiled kernels.
_NO_CACHES = {"XDG_CACHE_HOME": "/dev/null", "CUDA_CACHE_DISABLE": "1"}
_MARK = b"\0"  # before a finding; checks print no such byte


def run(checks: Sequence[Check], seconds: float = SECONDS) -> Iterator[Finding]:
    """Yield what each check finds; if one ends the process, the others are skipped."""
    read_fd, write_fd = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(read_fd)
        os.close(write_fd)
        found = f"no process could be started: {error}"
        advice = "Raise the limits of processes and memory."
        yield from (problem(found, advice) for _ in checks)
        return
    if pid == 0:
        _serve(checks, write_fd, int(seconds) + _GRACE_SECONDS)
    os.close(write_fd)
    output, lost_in = bytearray(), ""
    try:
        for check in checks:
            if lost_in:
                yield _skipped(lost_in)
            elif lost := _wait(pid, read_fd, output, seconds):
                lost_in = check.name
                lines = output.decode(errors="replace").strip().splitlines()
                yield problem(f"{lost}: {lines[-1]}" if lines else lost, check.hint)
            else:
                line, _, output[:] = output.partition(_MARK)[2].partition(b"\n")
                status, found, advice = json.loads(line)
                yield Finding(Status(status), found, advice)
    finally:
        os.close(read_fd)
        _end(pid)


def _skipped(name: str) -> Finding:
    return warning(f"not looked at, because of {name}", "Fix that first.")


def _wait(pid: int, fd: int, output: bytearray, seconds: float) -> str:
    """Read until an answer is complete; return why none comes, or ""."""
    until = time.monotonic() + seconds
    while b"\n" not in output.partition(_MARK)[2]:
        rest = max(until - time.monotonic(), 0)
        if not select.select([fd], [], [], rest)[0]:
            return f"no answer after {seconds:g} s"
        data = os.read(fd, 65536)
        if not data:
            code = _end(pid)
            if code >= 0:
                return f"the check's process ended with status {code}"
            return f"the check's process was ended by {signal.Signals(-code).name}"
        output += data
    return ""


def _end(pid: int) -> int:
    """End the process, if it still runs, and its children; return its exit code."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    until = time.monotonic() + _END_SECONDS
    with suppress(ChildProcessError):  # it was waited for before
        while time.monotonic() < until:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
    return 0


def _serve(checks: Sequence[Check], fd: int, seconds: int) -> NoReturn:
    """Make the checks in this process, and write their findings."""
    try:
        os.setpgid(0, 0)  # so that _end() ends its children, too
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(fd, stream)
        printed = open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stdout = sys.stderr = printed
        bad: set[str] = set()
        for check in checks:
            signal.alarm(seconds)  # if the doctor is gone
            if check.look.__module__.endswith(".gpus"):
                os.environ.update(_NO_CACHES)
            is_blocked = check.needs in bad
            try:
                finding = _skipped(check.needs) if is_blocked else check.look()
            except BaseException as error:  # SystemExit, too, from a module's import
                finding = problem(describe(error), FAILED)
            if is_blocked or finding.status is Status.PROBLEM:
                bad.add(check.name)
            printed.flush()
            os.write(1, _MARK + json.dumps(astuple(finding)).encode() + b"\n")
    finally:
        os._exit(0)  # even if a check has left threads
