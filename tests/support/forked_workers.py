"""Ranks of `launch` forked from a server that has imported torch.

A rank's interpreter takes 3 s of CPU to import torch.  Inside ::

    with forked_workers():
        ...

this process starts its ranks by a server's fork instead, in some 30 ms: the same code,
with the same arguments, descriptors, environment and folder.  Tests of how ranks start
and end do without it.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

_MOST_BYTES = 1 << 18
_MOST_FDS = 64
_servers: dict[int, _Server] = {}  # by process: a forked child starts its own


# ---- in the process that tests ------------------------------------------------------


class _Server:
    """The server of this process, which ends with it."""

    def __init__(self, env: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST_BYTES)
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        module = "__import__('support.forked_workers').forked_workers"
        with theirs:
            subprocess.Popen(
                [sys.executable, "-c", f"{module}._serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                env={**env, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def ask(self, words: dict[str, Any], fds: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(words).encode()], fds)
            return int(self._socket.recv(_MOST_BYTES))


class _Process:
    """What `launch` uses of `subprocess.Popen`."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        env: dict[str, str],
        pass_fds: list[int],
        start_new_session: bool,
    ) -> None:
        assert stdin == subprocess.DEVNULL
        assert start_new_session
        if os.getpid() not in _servers:
            _servers[os.getpid()] = _Server(env)
        self._server = _servers[os.getpid()]
        words = {
            "argv": command[command.index("-c") + 1 :],
            "env": env,
            "folder": os.getcwd(),
            "parent": os.getpid(),
            "targets": [1, 2, *pass_fds],
        }
        self.pid = self._server.ask(words, [stdout, stderr, *pass_fds])
        self._pidfd = os.pidfd_open(self.pid)
        self.returncode: int | None = None

    def kill(self) -> None:
        os.kill(self.pid, 9)

    def wait(self) -> int:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            poller.poll()
            os.close(self._pidfd)
            self.returncode = self._server.ask({"reap": self.pid}, [])
        return self.returncode


@contextmanager
def forked_workers() -> Iterator[None]:
    """Have this process start ranks by a server's fork."""
    from paceline._launch import processes

    before = processes.subprocess
    processes.subprocess = types.SimpleNamespace(  # type: ignore[assignment]
        Popen=_Process,
        DEVNULL=subprocess.DEVNULL,
        _args_from_interpreter_flags=list,
    )
    try:
        yield
    finally:
        processes.subprocess = before


# ---- in the server ------------------------------------------------------------------


def _serve(fd: int) -> NoReturn:
    """Import what ranks import; then fork, and reap, as asked."""
    import paceline._launch.rank  # noqa: F401

    gc.freeze()
    with socket.socket(fileno=fd) as asked:
        while True:
            words, fds, _, _ = socket.recv_fds(asked, _MOST_BYTES, _MOST_FDS)
            if not words:
                os._exit(0)
            told = json.loads(words)
            if "reap" in told:
                _, status = os.waitpid(told["reap"], 0)
                answer = os.waitstatus_to_exitcode(status)
            else:
                answer = os.fork()
                if answer == 0:
                    asked.close()
                    _work(told, fds)
                for fd in fds:
                    os.close(fd)
            asked.send(str(answer).encode())


def _work(told: dict[str, Any], fds: list[int]) -> NoReturn:
    """Become a rank."""
    import numpy as np
    import torch

    try:
        os.setsid()
        os.chdir(told["folder"])
        first_free = max(told["targets"]) + 1
        high = [_move_up(fd, first_free) for fd in fds]
        for fd, target in zip(high, told["targets"], strict=True):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.clear()
        os.environ.update(told["env"])
        os.getppid = lambda: told["parent"]
        code, *sys.argv[1:] = told["argv"]
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
        np.random.seed()
        torch.set_num_threads(int(told["env"]["OMP_NUM_THREADS"]))
        exec(code)
        sys.exit(0)
    finally:
        os._exit(1)


def _move_up(fd: int, least: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(fd)
    return moved
