"""The worker processes of an engine: started anew where one has died, and asked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from paceline import _native
from paceline._dp.process.intra_op import IntraOp
from paceline._dp.process.outbox import Outbox
from paceline._recorder import Steps
from paceline._workers import group, log_records
from paceline._workers.answers import Reply, wait

_HANDLER = "paceline._dp.process.replica:Replica"


class ReplicaWorkers:
    """Worker processes, each of which is a replica; channel k is to replica k + 1."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.outbox = Outbox(n)
        self.steps: Steps | None = None  # what records the step under way
        self._lock, self._lock_pid = threading.RLock(), os.getpid()
        self.start()

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """Held by who uses the channels; in a forked child one of its own."""
        if self._lock_pid != os.getpid():
            self._lock, self._lock_pid = threading.RLock(), os.getpid()
        return self._lock

    def start(self) -> None:
        """Start the processes; they import torch while this process goes on."""
        self._pid = os.getpid()
        self.group = group.WorkerGroup(self.n, _HANDLER)
        self.channels = self.group.channels
        self._intra_op = IntraOp(self.group.shares[0].n_threads)

    @property
    def is_sound(self) -> bool:
        """Whether all live, as far as is known, and are this process's."""
        return self.group.is_sound and self._pid == os.getpid()

    def wait_until_ready(self) -> None:
        """Wait until all have imported torch."""
        if not self.group.is_ready:
            self.group.wait_until_ready()

    def take_answers(
        self,
        n: int,
        copies: bool,
        error_of: Callable[[int, bytes], Exception | None] | None = None,
        records: log_records.Records | None = None,
    ) -> list[Reply]:
        """Wait for the first `n` replicas; raise the lowest one's error, if any."""
        if self.steps is not None:
            self.steps.wait_begins()
        answers, errors = wait(
            self.channels[:n], copies, error_of=error_of, records=records
        )
        if self.steps is not None:
            self.steps.wait_ends()
        if errors:
            self._record_deaths(errors)
            self.outbox.resend(range(n))
            raise errors[0]
        return answers

    def wait_until_idle(self) -> None:
        """Wait for answers that nobody took: the next request finds all listening."""
        for k, channel in enumerate(self.channels, start=1):
            if channel.is_busy:  # whoever posted that has failed before the answer
                self._record_deaths(wait([channel], False, k)[1])
                self.outbox.resend(range(self.n))

    def _record_deaths(self, errors: list[Exception]) -> None:
        if any(isinstance(error, _native.PeerError) for error in errors):
            self.group.is_sound = False

    def close(self) -> None:
        """End the processes; this one's operators have all cores again."""
        self._intra_op.give_back()
        self.group.close()
