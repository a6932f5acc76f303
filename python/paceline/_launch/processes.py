"""Start the processes of ranks, follow them, and leave none behind.

One loop on the caller's thread forwards the ranks' output, takes their answers and
detects the end of their processes.

    caller                                     rank
    call, in memory that all ranks map   -->   main.py
    answer                              <--    one pipe
    sys.stdout, sys.stderr              <--    two pipes

A rank ends when its function has returned and its threads have ended, when it is
killed, or when the caller's process ends in whatever way: the rank watches a pipe, and
a pidfd of the caller if there is one: some builds of Python and sandboxes lack pidfds.
The caller polls for the end of its ranks.  Each leads a process group, which ends with
it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, spawn

from paceline import _cgroup
from paceline._launch import main
from paceline._launch.messages import Call

CLOSE_SECONDS = 5.0
"""How long a rank that has answered may take to end, once another has failed."""
_POLL_SECONDS = 0.05
_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 20
"""A longer line is forwarded before its end."""
_MOST_READS = 1000
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables that would bind the threads of all ranks to the same cores."""

_open: set[Processes] = set()


# ---- what ranks print ---------------------------------------------------------------


class _Output:
    """Forwards one rank's stdout or stderr to that of this process."""

    def __init__(self, fd: int, name: str, prefix: str) -> None:
        self.fd, self._name, self._prefix = fd, name, prefix
        self._rest = b""

    def pump(self, most_reads: int = 1) -> bool:
        """Forward the output so far; return False at its end."""
        for _ in range(most_reads):
            try:
                data = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                break
            printed = self._rest + data
            end = printed.rfind(b"\n") + 1
            if not self._prefix:  # a progress bar shows what it then overwrites
                end = max(end, printed.rfind(b"\r") + 1)
            self._rest = printed[end:]
            self._forward(printed[:end])
            if not data or len(self._rest) > _MOST_LINE_BYTES:
                self._finish()
            if not data:
                return False
        return True

    def drain(self) -> None:
        """Forward the output so far, and a last line without its end.

        Stop after some reads: a process may never stop writing.
        """
        self.pump(_MOST_READS)
        self._finish()

    def _finish(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self._forward(rest + b"\n")

    def _forward(self, printed: bytes) -> None:
        text = printed.decode("utf-8", "replace")
        if self._prefix:
            lines = text.split("\n")[:-1]
            text = "".join(f"{self._prefix}{line}\n" for line in lines)
        stream = getattr(sys, self._name, None)
        if not text or stream is None:
            return
        # If a user's stream raises, the next line must still be forwarded.
        with contextlib.suppress(Exception):
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode("ascii", "backslashreplace").decode())
            stream.flush()


# ---- one process --------------------------------------------------------------------


class _Process:
    """One rank's process, on the side of its caller."""

    def __init__(
        self, rank: int, environ: Mapping[str, str], inherited: Sequence[int]
    ) -> None:
        self.rank = rank
        # The rank's answer, or a text on how its process ended without one.
        self.outcome: bytes | str | None = None
        self.is_running = True  # until its end is seen
        self._outputs: list[_Output] = []
        with contextlib.ExitStack() as held:
            self._answers, answers_end = multiprocessing.Pipe(duplex=False)
            held.enter_context(self._answers)
            with answers_end:
                fds = [answers_end.fileno(), *inherited]
                self._popen = subprocess.Popen(
                    [*_command(), *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environ,
                    pass_fds=[fd for fd in fds if fd >= 0],
                    start_new_session=True,
                )
            for name in ("stdout", "stderr"):
                fd = held.enter_context(getattr(self._popen, name)).fileno()
                os.set_blocking(fd, False)
                prefix = f"[rank {rank}] " if rank else ""
                self._outputs.append(_Output(fd, name, prefix))
            self._held = held.pop_all()

    @property
    def jobs(self) -> dict[int, Callable[[], None]]:
        """What to call when a descriptor is readable."""
        jobs: dict[int, Callable[[], None]] = {}
        for output in self._outputs:
            jobs[output.fd] = functools.partial(self._forward, output)
        if not self._answers.closed:
            jobs[self._answers.fileno()] = self._take_answer
        return jobs

    def poll(self) -> None:
        """Finish with the process if it has ended."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT  # `_end` reaps it
        with contextlib.suppress(ChildProcessError):  # the program ignores SIGCHLD
            if os.waitid(os.P_PID, self._popen.pid, how) is None:
                return
        self._end()

    def _forward(self, output: _Output) -> None:
        if not output.pump():
            self._outputs.remove(output)

    def _take_answer(self) -> None:
        with self._answers, contextlib.suppress(EOFError, OSError):
            self.outcome = self._answers.recv_bytes()

    def _end(self) -> None:
        if not self._answers.closed and self._answers.poll():
            self._take_answer()
        self.kill()  # the processes that the rank has started
        status = self._popen.wait()
        self.is_running = False
        if self.outcome is None:
            self.outcome = (
                f"rank {self.rank} (process {self._popen.pid}) {_describe(status)} "
                "before it answered"
            )
        for output in self._outputs:
            output.drain()
        self.close()

    def kill(self) -> None:
        """Kill the process, and those that it has started."""
        if self.is_running:  # not reaped yet: the PID is still its own
            for kill in (os.kill, os.killpg):
                with contextlib.suppress(ProcessLookupError):
                    kill(self._popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptors that this process holds for it."""
        self.is_running = False
        self._outputs = []
        self._held.close()


def _open_pidfd(held: contextlib.ExitStack) -> int:
    """Return this process's pidfd, which `held` closes; -1 if there are no pidfds."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return -1
    held.callback(os.close, pidfd)
    return pidfd


def _open_memory(held: contextlib.ExitStack) -> int:
    """Return a file without a name that `held` closes: in memory, else on a disk."""
    try:
        fd = os.memfd_create("paceline-call")
    except (AttributeError, OSError):
        return held.enter_context(tempfile.TemporaryFile()).fileno()
    held.callback(os.close, fd)
    return fd


def _command() -> list[str]:
    """Return the start of a rank's command line: it runs `main`, found as here."""
    executable = spawn.get_executable()
    if not executable:
        raise RuntimeError(
            "ranks need a Python interpreter, but sys.executable is not set: call "
            "multiprocessing.set_executable(path) first"
        )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = [str(folder) for folder in sys.path]
    code = f"import sys; sys.path[:] = {path!a}; from {main.__name__} import main"
    return [os.fsdecode(executable), *flags, "-c", f"{code}; main()"]


def _describe(status: int) -> str:
    """Return how a process ended; `status` is a return code of ``subprocess``."""
    if status >= 0:
        return f"ended by itself with status {status}"
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL (the kernel does so if memory runs out)"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"


# ---- all of them --------------------------------------------------------------------


class Processes:
    """The processes of all ranks, for use by one thread; close() ends them."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self._told: set[int] = set()
        self._pipe_fd = -1
        _open.add(self)

    def start(self, call: Call, environs: Sequence[Mapping[str, str]]) -> None:
        """Start a rank for each of `environs`: its variables besides the caller's."""
        common = _environment(_cgroup.threads_of_each(len(environs)))
        with contextlib.ExitStack() as ranks_own:
            call_fd = _open_memory(ranks_own)
            with open(call_fd, "wb", closefd=False) as file:
                pickle.dump(call, file)
            caller_fd = _open_pidfd(ranks_own)
            pipe_fd, self._pipe_fd = os.pipe()
            ranks_own.callback(os.close, pipe_fd)
            inherited = call_fd, caller_fd, pipe_fd
            for rank, environ in enumerate(environs):
                self._processes.append(_Process(rank, {**common, **environ}, inherited))

    def wait(self, seconds: float | None) -> tuple[int, bytes | str] | None:
        """Wait for a rank's outcome; return rank and outcome, each rank once.

        The outcome is the answer, or a text on how the process ended without one.
        Return None after `seconds`.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            for process in self._processes:
                if process.outcome is not None and process.rank not in self._told:
                    self._told.add(process.rank)
                    return process.rank, process.outcome
            if not self._turn(until):
                return None

    def wait_until_ended(self, seconds: float | None = None) -> None:
        """Wait until all processes have ended, or `seconds` have passed."""
        until = None if seconds is None else time.monotonic() + seconds
        while any(process.is_running for process in self._processes):
            if not self._turn(until):
                return

    def _turn(self, until: float | None) -> bool:
        """Wait for something to do, and do it; return False if time runs out."""
        running = [process for process in self._processes if process.is_running]
        jobs: dict[int, Callable[[], None]] = {}
        for process in running:
            jobs |= process.jobs
        left = math.inf if until is None else max(0.0, until - time.monotonic())
        ready = connection.wait(list(jobs), min(left, _POLL_SECONDS))
        for fd, job in jobs.items():
            if fd in ready:
                job()
        for process in running:
            process.poll()
        return bool(ready) or left > _POLL_SECONDS

    def close(self) -> None:
        """Kill the ranks that have not answered; let the others end, then kill them."""
        try:
            for process in self._processes:
                if process.outcome is None:
                    process.kill()
            self.wait_until_ended(CLOSE_SECONDS)
        finally:
            for process in self._processes:
                process.kill()
            self.wait_until_ended(CLOSE_SECONDS)
            self.forget()

    def forget(self) -> None:
        """Close the descriptors of this process, and leave the ranks alone."""
        for process in self._processes:
            process.close()
        if self._pipe_fd >= 0:
            os.close(self._pipe_fd)
            self._pipe_fd = -1
        _open.discard(self)


def _forget_all() -> None:
    for processes in list(_open):
        processes.forget()


os.register_at_fork(after_in_child=_forget_all)


def _environment(n_threads: int) -> dict[str, str]:
    """Return the environment of a rank that computes with `n_threads`."""
    environ = {k: v for k, v in os.environ.items() if k not in _BINDING}
    return {
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this host
        **environ,
        "OMP_NUM_THREADS": str(n_threads),
        "MKL_NUM_THREADS": str(n_threads),
    }
