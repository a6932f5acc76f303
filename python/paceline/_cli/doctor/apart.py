"""Runs checks in a process of their own: a crash or a hang is a finding.

::

    doctor                          probe (this file, as a program)
      a check's name     -- stdin ->   runs the check
      the finding, JSON  <- pipe --    one line

One probe serves all checks, and a new one those that follow a crash or a hang.  The
probe ends when the doctor does: its standard input ends then, a thread of it waits for
that, and a timer of the kernel's ends it where it cannot run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from paceline._cli.doctor.children import command
from paceline._cli.doctor.finding import Check, Finding, Status, problem

_GRACE_SECONDS = 5
_END_SECONDS = 5.0
_KEPT_BYTES = 4096


class Probe:
    """A process that runs checks, one after another.  A context manager.

    Parameters
    ----------
    table : str
        The module whose ``CHECKS`` the process is to know.
    """

    def __init__(self, table: str) -> None:
        self._table = table
        self._process: subprocess.Popen[bytes] | None = None
        self._results = -1
        self._output = bytearray()  # the last of what it printed

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *error: Any) -> None:
        self._end()

    def run(self, check: Check) -> Finding:
        """Run a check there."""
        try:
            if self._process is None:
                self._start()
        except (OSError, RuntimeError) as error:
            return problem(
                f"no process could be started: {error}",
                "Raise the limits of processes and memory.",
            )
        try:
            line = self._ask(check)
        except TimeoutError:
            self._end()
            return self._lost(check, f"there was no answer after {check.seconds:g} s")
        except EOFError:
            return self._lost(check, f"the process that looked {_outcome(self._end())}")
        return Finding(Status(line["status"]), line["found"], line["advice"])

    def _start(self) -> None:
        read, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                command(__name__, "serve", self._table, str(write)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                start_new_session=True,  # so that all that it starts can be ended
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._results = read
        self._output.clear()

    def _ask(self, check: Check) -> dict[str, str]:
        """Return what the probe answers."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{check.name}\n".encode())
            self._process.stdin.flush()
        until = time.monotonic() + check.seconds
        answer = bytearray()
        while not answer.endswith(b"\n"):
            self._wait(until - time.monotonic())
            data = os.read(self._results, 65536)
            if not data:
                raise EOFError
            answer += data
        line: dict[str, str] = json.loads(answer)
        return line

    def _wait(self, seconds: float) -> None:
        """Wait for an answer; keep the last of what is printed meanwhile."""
        assert self._process is not None
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._results, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            while (rest := until - time.monotonic()) > 0:
                ready = [key.fd for key, _ in selector.select(rest)]
                if output in ready and not self._read_output(output):
                    selector.unregister(output)
                if self._results in ready:
                    return
        raise TimeoutError

    def _read_output(self, output: int) -> bool:
        """Read some of what was printed; tell whether there may be more."""
        data = os.read(output, 65536)
        self._output = (self._output + data)[-_KEPT_BYTES:]
        return bool(data)

    def _lost(self, check: Check, found: str) -> Finding:
        """Return the finding about a probe that has crashed, or was ended."""
        lines = bytes(self._output).decode(errors="replace").strip().splitlines()
        return problem(f"{found}: {lines[-1]}" if lines else found, check.hint)

    def _end(self) -> int | None:
        """End the probe and all that it has started; return its exit status.

        None: it stays until the kernel lets go of it, as a driver that hangs makes it.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped, so the number is its
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        os.close(self._results)
        self._results = -1
        return process.returncode


def _outcome(status: int | None) -> str:
    """Return what has become of a process, in words."""
    if status is None:
        return "answers no more"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-status}"


# ---- in the probe -------------------------------------------------------------------


def serve(table: str, results: str) -> None:
    """Be the probe: run the checks whose names come by standard input."""
    checks = {check.name: check for check in importlib.import_module(table).CHECKS}
    names: list[str] = []
    has_name = threading.Semaphore(0)
    threading.Thread(target=_read_names, args=(names, has_name), daemon=True).start()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Compiled kernels are kept nowhere: not by Paceline, not by the driver.
    os.environ.update({"XDG_CACHE_HOME": "/dev/null", "CUDA_CACHE_DISABLE": "1"})
    while True:
        has_name.acquire()
        check = checks[names.pop(0)]
        signal.alarm(int(check.seconds) + _GRACE_SECONDS)
        finding = check.run()
        signal.alarm(0)
        line = json.dumps(
            {
                "status": finding.status.value,
                "found": finding.found,
                "advice": finding.advice,
            }
        )
        _write_all(int(results), f"{line}\n".encode())


def _read_names(names: list[str], has_name: threading.Semaphore) -> None:
    for line in sys.stdin:
        names.append(line.strip())
        has_name.release()
    os._exit(0)  # the doctor is gone


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
