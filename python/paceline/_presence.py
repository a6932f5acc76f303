"""Who the ranks of a process group are, whether each still runs, and words for them.

Words go by the group's own collectives where those take CPU tensors, and by its store
where they do not: NCCL would make a communicator for them, and cannot be left.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from paceline import _native, _torch_groups

POLL_SECONDS = 0.002
LOOK_FIRST_SECONDS = 0.01
LOOK_EVERY_SECONDS = 0.1
_BLAME_SECONDS = 0.6
"""How long a failed exchange looks for the rank that caused it."""
_LAST_LOOK_SECONDS = 2.0
"""How long the process that had the store may take to end, once that is gone."""

_wrap_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True)
class Host:
    """Where a rank runs: what must agree for ranks to share memory and see each other.

    Attributes
    ----------
    boot : str
        The kernel's boot id.
    network : int
        Network namespace, which the abstract sockets live in.
    processes : int
        PID namespace: process ids mean the same inside one.
    pid : int
        The rank's process id in its own namespace.
    """

    boot: str
    network: int
    processes: int
    pid: int

    @classmethod
    def here(cls) -> Host:
        """Describe this process."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return cls(
            boot=boot,
            network=os.stat("/proc/self/ns/net").st_ino,
            processes=os.stat("/proc/self/ns/pid").st_ino,
            pid=os.getpid(),
        )

    def shares_memory_with(self, other: Host) -> bool:
        """Tell whether ranks there and here can map the same memory."""
        return self.boot == other.boot and self.network == other.network

    def visible_pid(self, viewer: Host) -> int:
        """Return the process id as ``viewer`` sees it; 0 where it cannot."""
        return self.pid if self.processes == viewer.processes else 0


def _has_ended(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(0))
    finally:
        os.close(fd)


class Presence:
    """Who the ranks are, and whether each still runs.

    Until the ranks have met they know each other from the store alone.  From then on no
    call of the store is needed, which matters: a store that a dead rank 0 hosted does
    not answer, nor is its connection lost while that rank's DataLoader workers live.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.here = Host.here()
        self._hosts: dict[int, Host] = {rank: self.here}
        self._store: Any = None  # torch.distributed.Store
        self._kept_store: Any = None
        self._n_told = 0
        store = _torch_groups.group_store(group)
        if store is None:
            return
        name = _torch_groups.group_name(group)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        number = next(_wrap_numbers[name])
        prefix = f"paceline/{name}/{restart}/{number}"
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._kept_store = self._store
        with self._store_failure():
            self._store.set(f"host/{rank}", json.dumps(vars(self.here)))
            self._read_hosts(self._store)

    @property
    def hosts(self) -> list[Host]:
        """Where each rank runs, once all are known."""
        return [self._hosts[rank] for rank in range(self.size)]

    def meet(self, hosts: list[Host]) -> None:
        """Take over what the ranks have told each other."""
        self._hosts = dict(enumerate(hosts))
        if all(host.processes == self.here.processes for host in hosts):
            self._store = None  # every process can be watched from here

    def _store_failure(self) -> _StoreFailure:
        return _StoreFailure(self.rank)

    def _read_hosts(self, store: Any) -> None:
        for rank in range(self.size):
            if rank not in self._hosts and store.check([f"host/{rank}"]):
                words = json.loads(store.get(f"host/{rank}"))
                self._hosts[rank] = Host(**words)

    def look(self) -> None:
        """Raise ``PeerError`` where a rank is known to be gone."""
        self._look_at_processes()
        if self._store is None:
            return
        with self._store_failure():
            if self._store.check(["gone"]):
                gone = int(self._store.get("gone"))
                self._fail(gone, "died during construction")
            self._read_hosts(self._store)
        self._look_at_processes()

    def _look_at_processes(self) -> None:
        for rank, host in self._hosts.items():
            if rank == self.rank or host.boot != self.here.boot:
                continue
            pid = host.visible_pid(self.here)
            if pid and _has_ended(pid):
                if self._store is not None and rank != 0:
                    with self._store_failure():
                        self._store.set("gone", str(rank))
                self._fail(rank, f"(process {pid}) died during construction")

    @property
    def store(self) -> Any:
        """The group's store, under a prefix of this meeting; None: torch shows none."""
        return self._kept_store

    def tell(self, words: bytes, seconds: float) -> list[bytes]:
        """Give `words` to all ranks by the store; return every rank's, by rank.

        Raises
        ------
        paceline.PeerError
            If a rank dies meanwhile; a ``PeerTimeoutError`` if one has said nothing
            after `seconds`.
        """
        try:
            return self._tell(words, seconds)
        except _native.PeerError as error:
            if isinstance(error.__cause__, dist.DistError):
                self._look_who_ended()  # it had the store, and may be a zombie yet
            raise

    def _look_who_ended(self) -> None:
        self._store = None
        until = time.monotonic() + _LAST_LOOK_SECONDS
        while time.monotonic() < until:
            self._look_at_processes()
            time.sleep(10 * POLL_SECONDS)

    def _tell(self, words: bytes, seconds: float) -> list[bytes]:
        store, number = self._kept_store, self._n_told
        self._n_told += 1
        with self._store_failure():
            store.set(f"words/{number}/{self.rank}", words)
        told = {self.rank: words}
        until = time.monotonic() + seconds
        pause = POLL_SECONDS
        while len(told) < self.size:
            self.look()
            with self._store_failure():
                self._read_words(store, number, told)
            if time.monotonic() > until:
                silent = [rank for rank in range(self.size) if rank not in told]
                raise _native.PeerTimeoutError(
                    f"rank {self.rank}: ranks {silent} have not come to this "
                    f"construction within {seconds:g} s, the process group's timeout"
                )
            if len(told) < self.size:
                time.sleep(pause)
                # One store serves all ranks, and the one that is awaited, too.
                pause = min(2 * pause, LOOK_EVERY_SECONDS)
        if number > 0:  # all have read the words before: they have said these
            with suppress(RuntimeError):
                store.delete_key(f"words/{number - 1}/{self.rank}")
        return [told[rank] for rank in range(self.size)]

    def _read_words(self, store: Any, number: int, told: dict[int, bytes]) -> None:
        for rank in range(self.size):
            key = f"words/{number}/{rank}"
            if rank not in told:
                if not store.check([key]):
                    return
                told[rank] = store.get(key)

    def blame(self, cause: BaseException) -> None:
        """Raise ``PeerError`` for a collective that failed, naming whom it can."""
        until = time.monotonic() + _BLAME_SECONDS
        while time.monotonic() < until:
            self.look()
            time.sleep(10 * POLL_SECONDS)
        silent = [rank for rank in range(self.size) if rank not in self._hosts]
        whom = f"rank {silent[0]}" if len(silent) == 1 else f"one of ranks {silent}"
        if not silent:
            whom = "a rank"
        raise _native.PeerError(
            f"rank {self.rank}: {whom} was lost during construction ({cause})"
        ) from cause

    def _fail(self, rank: int, words: str) -> None:
        raise _native.PeerError(f"rank {self.rank}: rank {rank} {words}")


class _StoreFailure:
    """Turns the store's own failures into the loss of rank 0, which hosts it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, dist.DistError):
            raise _native.PeerError(
                f"rank {self._rank}: the group's store is gone, and with it rank 0 or "
                f"the launcher that hosts it, during construction ({error})"
            ) from error
