"""Run checks in a separate process: a crash or a hang is a finding."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing import spawn

from paceline._cli.doctor.finding import Check, Finding, Status, problem

_GRACE_SECONDS = 5
_END_SECONDS = 5.0
# Neither Paceline nor the driver keeps compiled kernels.
_NO_CACHES = {"XDG_CACHE_HOME": "/dev/null", "CUDA_CACHE_DISABLE": "1"}
_MARK = b"\0"  # before a finding; checks print no such byte


def command(function: Callable[..., object], *arguments: str) -> list[str]:
    """Return a command line that calls a function, with modules found as here."""
    executable = spawn.get_executable()
    if not executable:
        raise RuntimeError("no Python interpreter to start: sys.executable is not set")
    code = (
        f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
        f"from {function.__module__} import {function.__name__} as f; "
        f"f(*{list(arguments)!r})"
    )
    return [os.fsdecode(executable), "-c", code]


def run(checks: Sequence[Check]) -> Iterator[Finding]:
    """Yield what each check finds.  One process runs them; a crash starts another."""
    n_done = 0
    while n_done < len(checks):
        try:
            process = _start(checks[n_done:])
        except (OSError, RuntimeError) as error:
            yield problem(
                f"no process could be started: {error}",
                "Raise the limits of processes and memory.",
            )
            n_done += 1
            continue
        output = bytearray()
        try:
            for check in checks[n_done:]:
                n_done += 1
                lost = _wait(process, output, check.seconds)
                if lost:
                    lines = output.decode(errors="replace").strip().splitlines()
                    found = f"{lost}: {lines[-1]}" if lines else lost
                    yield problem(found, check.hint)
                    break
                line, _, rest = output.partition(_MARK)[2].partition(b"\n")
                output[:] = rest
                answer = json.loads(line)
                yield Finding(
                    Status(answer["status"]), answer["found"], answer["advice"]
                )
        finally:
            _end(process)


def _start(checks: Sequence[Check]) -> subprocess.Popen[bytes]:
    looks = (
        f"{check.look.__module__} {check.look.__name__} {check.seconds}"
        for check in checks
    )
    return subprocess.Popen(
        command(serve, *looks),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that _end() ends its children, too
    )


def _wait(process: subprocess.Popen[bytes], output: bytearray, seconds: float) -> str:
    """Read until an answer is complete; return why none comes, or ""."""
    assert process.stdout is not None
    until = time.monotonic() + seconds
    while b"\n" not in output.partition(_MARK)[2]:
        rest = max(until - time.monotonic(), 0)
        if not select.select([process.stdout], [], [], rest)[0]:
            return f"no answer after {seconds:g} s"
        data = os.read(process.stdout.fileno(), 65536)
        if not data:
            status = process.wait()
            if status >= 0:
                return f"the check's process ended with status {status}"
            name = signal.Signals(-status).name
            return f"the check's process was ended by {name}"
        output += data
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)  # a driver may hold it for longer
    assert process.stdout is not None
    process.stdout.close()


def serve(*looks: str) -> None:
    """Run these checks in this process, and print their findings."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for words in looks:
        module, function, seconds = words.split()
        signal.alarm(int(float(seconds)) + _GRACE_SECONDS)  # if the doctor is gone
        if module.endswith(".gpus"):
            os.environ.update(_NO_CACHES)
        look: Callable[[], Finding] = getattr(importlib.import_module(module), function)
        found = json.dumps(asdict(Check(function, look, 0, "").run()))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.stdout: the check may have written half a line.
        os.write(1, _MARK + f"{found}\n".encode())
    os._exit(0)  # even if a check has left threads
