"""Worker processes: started side by side, listened to, and never left behind.

Its parts, and what each survives:

    WorkerGroup  the user's handle; may be closed, collected, or forgotten at exit
    _Processes   processes and descriptors, in the process that made them
    monitor      a daemon thread that forwards output, and reaps at the end; it holds
                 the _Processes alone, so it keeps no group alive

A worker ends when it is asked to, when it is killed, and when this process ends however
that goes: it watches a pidfd of this process, and a pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline import _native
from paceline._workers import answers, spawn
from paceline._workers import main as worker_main

SPIN_US = 2000.0
"""How long an end of a channel spins before it sleeps, where each has a core.

To sleep and be woken costs 50 us and more; an optimizer step is often shorter than
this.
"""
CROWDED_SPIN_US = 2.0
"""The same where there are fewer cores than processes."""
CLOSE_SECONDS = 5.0
_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 20
"""What is longer, and has no end yet, is forwarded as a line."""
_MOST_READS = 1000
_running: weakref.WeakSet[_Processes] = weakref.WeakSet()
_hooks_pid = 0


# ---- what the workers print ---------------------------------------------------------


class _OutputPipe:
    """One worker's stdout or stderr, on its way into this process's own."""

    def __init__(self, fd: int, name: str, prefix: str) -> None:
        self.fd, self._name, self._prefix = fd, name, prefix
        self._rest = b""

    def drain(self) -> None:
        """Forward all that is there now; who writes without end is not followed."""
        for _ in range(_MOST_READS):
            count = fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4))
            if not any(count):
                break
            self.pump()

    def pump(self) -> bool:
        """Forward what is there; return False at its end."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        printed = self._rest + data
        end = printed.rfind(b"\n") + 1
        if not self._prefix:  # a progress bar: what it overwrites, it shows first
            end = max(end, printed.rfind(b"\r") + 1)
        self._rest = printed[end:]
        self._forward(printed[:end])
        if not data or len(self._rest) > _MOST_LINE_BYTES:
            self.finish()
        return bool(data)

    def finish(self) -> None:
        """Forward a last line that has no end."""
        rest, self._rest = self._rest, b""
        if rest:
            self._forward(rest + b"\n")

    def _forward(self, printed: bytes) -> None:
        text = printed.decode("utf-8", "replace")
        if self._prefix:
            lines = text.split("\n")[:-1]
            text = "".join(f"{self._prefix}{line}\n" for line in lines)
        if text:
            self._write(text)

    def _write(self, text: str) -> None:
        stream = getattr(sys, self._name, None)
        if stream is None:
            return
        # Whatever a user's stream raises, the next line is to be forwarded too.
        with contextlib.suppress(Exception):
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode("ascii", "backslashreplace").decode())
            stream.flush()


# ---- the processes ------------------------------------------------------------------


@dataclass(eq=False)
class _Member:
    """One worker process, as its parent holds it."""

    number: int
    role: spawn.Role
    process: subprocess.Popen[bytes]
    pidfd: int
    outputs: list[_OutputPipe]

    @classmethod
    def of(
        cls,
        number: int,
        role: spawn.Role,
        process: subprocess.Popen[bytes],
        pipes: list[int],
    ) -> _Member:
        """Take over a process that was just started."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        names = zip(pipes, ("stdout", "stderr"), strict=True)
        prefix = role.prefix(number)
        outputs = [_OutputPipe(fd, name, prefix) for fd, name in names]
        return cls(number, role, process, pidfd, outputs)

    @property
    def name(self) -> str:
        return f"{self.role.noun} {self.number}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            if self.role.is_program:  # not reaped yet: the number is still its own
                os.killpg(self.process.pid, signal.SIGKILL)

    def has_ended(self, seconds: float | None = 0.0) -> bool:
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(None if seconds is None else seconds * 1000.0))

    def reap(self) -> None:
        """Take the status of a process that has ended, and forward its last output."""
        self.process.wait()
        for stream in self.outputs:
            stream.drain()
            stream.finish()
        self.close()

    def close(self) -> None:
        for fd in [self.pidfd, *(stream.fd for stream in self.outputs)]:
            os.close(fd)
        self.outputs = []


@dataclass(eq=False)
class _Processes:
    """Processes and descriptors of a group: all but its channels."""

    members: list[_Member] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)
    parent_pipe: int = -1
    wakeup: int = -1
    is_ending: bool = False
    may_end: list[None] = field(default_factory=lambda: [None])
    lock: threading.RLock = field(default_factory=threading.RLock)  # of the output
    monitor: threading.Thread | None = None

    def end(self, *, joins: bool) -> None:
        """Kill who is left; the monitor reaps them, and is waited for or not.

        Takes no lock, since a garbage collection may call it anywhere.
        """
        if self.pid != os.getpid():
            return
        with contextlib.suppress(IndexError):
            self.may_end.pop()  # one caller's alone
            for member in self.members:
                member.kill()
            if self.wakeup >= 0:
                os.eventfd_write(self.wakeup, 1)
            self.is_ending = True  # from here on the monitor closes descriptors
        if joins and self.monitor not in (None, threading.current_thread()):
            self.monitor.join(CLOSE_SECONDS)

    def reap(self) -> None:
        """Reap members that end or have ended, and close what is open."""
        with self.lock:
            for member in self.members:
                member.reap()
            self._close()

    def _close(self) -> None:
        self.members = []
        for fd in (self.parent_pipe, self.wakeup):
            if fd >= 0:
                os.close(fd)
        self.parent_pipe = self.wakeup = -1

    def forget(self) -> None:
        """In a forked child: close what the parent keeps open."""
        for member in self.members:
            member.close()
            member.process.returncode = 0  # not this process's to wait for
        self._close()


def _monitor(processes: _Processes) -> None:
    """Forward outputs until the end, and then see to it that nothing is left."""
    poller = select.poll()
    poller.register(processes.wakeup, select.POLLIN)
    streams = {s.fd: s for member in processes.members for s in member.outputs}
    for fd in streams:
        poller.register(fd, select.POLLIN)
    while not processes.is_ending:
        for fd, _ in poller.poll():
            with processes.lock:
                if fd in streams and not streams[fd].pump():
                    poller.unregister(fd)
    processes.reap()


def _forget_in_child() -> None:
    _native.forget_channels()
    for processes in list(_running):
        if processes.pid != os.getpid():
            processes.lock = threading.RLock()  # the parent's thread may have held it
            processes.forget()


def _end_all() -> None:
    for processes in list(_running):
        processes.end(joins=True)


def _set_hooks() -> None:
    global _hooks_pid
    if not _hooks_pid:
        os.register_at_fork(after_in_child=_forget_in_child)
        atexit.register(_end_all)  # a forked child's copy finds nothing of its own
        _hooks_pid = os.getpid()


class WorkerGroup:
    """Worker processes, each behind a channel.

    Making it returns while the workers are still starting.  Each is a fresh
    interpreter, neither forked nor importing the user's ``__main__``.  `handler` is the
    ``module:attribute`` of what is called, without arguments, in each worker, and whose
    ``handle`` then answers requests.  `role` says whether they are replicas 1, 2, ...
    or ranks 0, 1, ..., and `environs` what each has in its environment besides.

    Attributes
    ----------
    channels : list of paceline._native.Channel
        Channel k is to replica k + 1, or to rank k.  Each is busy until
        `wait_until_ready`.
    shares : list of Share
        Cores and threads of each replica or rank, number 0 first.
    is_ready : bool
        Whether every worker has been seen ready.
    is_sound : bool
        Whether all are alive, as far as whoever uses them has seen.
    """

    def __init__(
        self,
        n_workers: int,
        handler: str,
        role: spawn.Role = spawn.REPLICA,
        environs: Sequence[Mapping[str, str]] = (),
    ) -> None:
        from paceline._compat import torch_core

        torch_core.attach()
        _set_hooks()
        self.shares = spawn.share_cores(n_workers + role.first)
        if role.is_program:
            self.shares = [spawn.Share((), each.n_threads) for each in self.shares]
        self._role, self._environs = role, environs
        self.channels: list[_native.Channel] = []
        self.is_ready, self.is_sound = False, True
        self._processes = _Processes()
        _running.add(self._processes)
        try:
            self._start(n_workers, handler)
        except BaseException:
            self._abandon()
            raise
        self._finalizer = weakref.finalize(self, self._processes.end, joins=False)
        self._finalizer.atexit = False  # _end_all comes, and waits

    def _start(self, n_workers: int, handler: str) -> None:
        processes = self._processes
        pipe_fd, processes.parent_pipe = os.pipe()
        parent_fd = -1
        try:
            processes.wakeup = os.eventfd(0)
            with contextlib.suppress(OSError):  # no pidfds: the pipe alone tells
                parent_fd = os.pidfd_open(processes.pid)
            ends = [parent_fd, pipe_fd]
            for k in range(n_workers):
                self._start_one(k, handler, ends)
        finally:
            for fd in (parent_fd, pipe_fd):
                if fd >= 0:
                    os.close(fd)
        self._watch()
        processes.monitor = threading.Thread(
            target=_monitor, args=(processes,), name="paceline-workers", daemon=True
        )
        processes.monitor.start()

    def _start_one(self, k: int, handler: str, ends: list[int]) -> None:
        role = self._role
        number = role.first + k
        share = self.shares[number]
        channel = _native.Channel()
        environment, restored = spawn.environment(share.n_threads, role)
        if self._environs:
            environment.update(self._environs[k])
        payload = spawn.first_payload(share, restored, role)
        channel.post(worker_main.KIND_PREPARE, payload, [])
        inherited = [*channel.fds, *ends]
        pipes: list[tuple[int, int]] = []
        kept: list[int] = []
        try:
            for _ in ("stdout", "stderr"):
                pipes.append(os.pipe())
                os.set_blocking(pipes[-1][0], False)
            process = subprocess.Popen(
                spawn.command(inherited, handler),
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                env=environment,
                pass_fds=[fd for fd in inherited if fd >= 0],
                start_new_session=True,
            )
            member = _Member.of(number, role, process, [pipe[0] for pipe in pipes])
            kept = [pipe[0] for pipe in pipes]
        finally:
            for fd in (fd for pipe in pipes for fd in pipe):
                if fd not in kept:
                    os.close(fd)
        self._processes.members.append(member)
        self.channels.append(channel)

    def _watch(self) -> None:
        is_crowded = not self.shares[0].cores
        workers = self.shares[self._role.first :]
        pinned = [core for share in workers for core in share.cores]
        for member, channel in zip(self._processes.members, self.channels, strict=True):
            channel.watch(member.process.pid, member.name)
            channel.avoid(pinned)
            channel.spin_us = CROWDED_SPIN_US if is_crowded else SPIN_US

    def _abandon(self) -> None:
        """Undo a construction that failed half-way."""
        processes = self._processes
        if processes.monitor is not None and processes.monitor.is_alive():
            processes.end(joins=True)
        else:
            processes.is_ending = True
            for member in processes.members:
                member.kill()
            processes.reap()
        for channel in self.channels:
            channel.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers; empty once closed."""
        return [member.process.pid for member in self._processes.members]

    def wait_until_ready(self) -> None:
        """Wait until every worker has imported torch and made its handler.

        Raise PeerError if a worker ended instead, or what making the handler raised.
        """
        _, errors = answers.wait(self.channels, copies=True)
        if errors:
            self.drain_output()
            raise errors[0]
        self.is_ready = True

    def wait_until_ended(self) -> None:
        """Wait until every worker has ended by itself; QUIT was posted to each."""
        for member in self._processes.members:
            member.has_ended(None)

    def drain_output(self) -> None:
        """Forward now what workers have printed before their last answers."""
        with self._processes.lock:
            for member in self._processes.members:
                for stream in member.outputs:
                    stream.drain()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End the workers, and wait until nothing is left of them.

        Workers that have nothing to do are asked; one that computes still is killed, as
        is one that does not end in time.
        """
        processes = self._processes
        if processes.pid != os.getpid():
            return  # a forked child: they are its parent's
        if not processes.is_ending:
            until = time.monotonic() + timeout
            for member, channel in zip(processes.members, self.channels, strict=True):
                self._ask_to_quit(member, channel)
            for member in processes.members:
                member.has_ended(max(0.0, until - time.monotonic()))
        processes.end(joins=True)
        self._finalizer.detach()
        for channel in self.channels:
            channel.close()

    def _ask_to_quit(self, member: _Member, channel: _native.Channel) -> None:
        if channel.is_busy or not channel.fds:
            member.kill()
            return
        with contextlib.suppress(RuntimeError, MemoryError):
            channel.post(worker_main.KIND_QUIT, b"", [])
