"""The contestants' processes, as the parent sees them: started, asked, ended."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import dp_contestants
import processes
from groups import environment

SCRIPT = Path(__file__).with_name("dp_process.py")
Figures = dict[str, Any]


class PlayerError(Exception):
    """A contestant failed or ran out of time; the message has its last output."""


class Player:
    """One contestant: its processes, each with a line to us."""

    def __init__(
        self, contestant: str, model: str, malloc: str, *, pin: bool, seconds: float
    ) -> None:
        self.name = contestant
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as we live
        self.seconds = seconds
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        entry = dp_contestants.BY_NAME[contestant]
        for rank in range(entry.ranks):
            core = str(rank) if pin and entry.ranks > 1 else "-"
            self.add_process(core, environment(malloc, entry.threads))
        store = f"{self.folder.name}/store"
        for rank, pipe in enumerate(self.pipes):
            pipe.send(
                {"contestant": contestant, "model": model, "rank": rank, "store": store}
            )

    def add_process(self, core: str, env: dict[str, str]) -> None:
        """Start one process and keep a line to it."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(theirs.fileno()), core],
                    env=env,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=self.log,
                )
            )
            self.pipes.append(Connection(ours.detach()))

    def ask(self, order: str, **more: Any) -> list[Figures]:
        """Send an order to all processes and wait for their answers, in rank order."""
        try:
            for pipe in self.pipes:
                pipe.send({"do": order, **more})
        except OSError as error:
            raise PlayerError(self.last_words(f"is gone at {order!r}")) from error
        return self.answers(order)

    def answers(self, order: str) -> list[Figures]:
        """Wait for one answer of each process."""
        found: dict[int, Figures] = {}
        deadline = time.monotonic() + self.seconds
        while len(found) < len(self.pipes):
            waiting = {i: p for i, p in enumerate(self.pipes) if i not in found}
            ready = wait(list(waiting.values()), deadline - time.monotonic())
            if not ready:
                raise PlayerError(self.last_words(f"has not ended {order!r} in time"))
            for rank, pipe in waiting.items():
                if pipe not in ready:
                    continue
                try:
                    found[rank] = pipe.recv()
                except (EOFError, OSError) as error:
                    words = self.last_words(f"failed at {order!r}")
                    raise PlayerError(words) from error
        return [found[i] for i in range(len(self.pipes))]

    def last_words(self, what: str) -> str:
        """Describe the failure, with the end of the output."""
        self.log.seek(0)
        tail = "\n".join(self.log.read().strip().splitlines()[-25:])
        return f"{self.name} {what}:\n{tail}"

    def pss_mib(self) -> float:
        """The memory of all its processes, whoever started them."""
        pids = [pid for p in self.processes for pid in processes.tree(p.pid)]
        return sum(processes.pss_mib(pid) for pid in pids)

    def end(self) -> None:
        """End all processes; who does not go by itself is killed."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.log.close()
        self.folder.cleanup()


@contextmanager
def playing(*args: Any, **options: Any) -> Iterator[Player]:
    """Have a player for the time of a block."""
    player = Player(*args, **options)
    try:
        yield player
    finally:
        player.end()
