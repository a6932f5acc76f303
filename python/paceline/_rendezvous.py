"""From a user's process group to a world of ranks: in shared memory, where it can be.

The group's own collectives carry the first words, since its connections already notice
a rank that dies; the group's store carries each rank's process id beforehand, so that
the rank can be named.  From then on the native world watches the processes itself.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import pickle
import select
import sys
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import util
from typing import Any

import torch
import torch.distributed as dist

from paceline import _native, _relay, _torch, _torch_groups

_POLL_SECONDS = 0.002
_LOOK_FIRST_SECONDS = 0.01
_LOOK_EVERY_SECONDS = 0.1
_BLAME_SECONDS = 0.6
"""How long a failed exchange looks for the rank that caused it."""

_wrap_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
_live_worlds: weakref.WeakSet[_native.World] = weakref.WeakSet()
_owner_pid = 0


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


class _Presence:
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
        store = _torch_groups.group_store(group)
        if store is None:
            return
        name = _torch_groups.group_name(group)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        number = next(_wrap_numbers[name])
        prefix = f"paceline/{name}/{restart}/{number}"
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
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

    def blame(self, cause: BaseException) -> None:
        """Raise ``PeerError`` for a collective that failed, naming whom it can."""
        until = time.monotonic() + _BLAME_SECONDS
        while time.monotonic() < until:
            self.look()
            time.sleep(10 * _POLL_SECONDS)
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


class Meeting:
    """The ranks of a process group, before they share memory.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The user's group.  Where Gloo carries its CPU tensors, and all ranks are on one
        host, they meet in shared memory; of any other kind its own collectives carry
        all that they say.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    is_relayed : bool
        Whether the group itself carries gradients; known after :meth:`exchange`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = _torch_groups.group_rank(group)
        self.size = int(group.size())
        kind = _torch_groups.cpu_backend_name(group)
        self._is_gloo = kind == "gloo"
        if kind == "nccl":
            raise NotImplementedError(
                "process_group carries tensors by 'nccl', which has no CPU tensors: "
                "this version of paceline trains on the CPU; make the group by "
                "init_process_group('gloo') or ('cpu:gloo,cuda:nccl')"
            )
        if self.size > 1 and self._is_gloo:
            self._presence = _Presence(group, self.rank, self.size)

    @property
    def is_relayed(self) -> bool:
        """Whether the group itself carries gradients; see the class."""
        if not self._is_gloo:
            return True
        if self.size == 1:
            return False
        first, *others = self._presence.hosts
        return not all(host.shares_memory_with(first) for host in others)

    def exchange(self, words: Any) -> list[Any]:
        """Give one picklable object to all ranks; return every rank's, by rank.

        Raises
        ------
        paceline.PeerError
            If a rank dies meanwhile.
        """
        if self.size == 1:
            return [words]
        if not self._is_gloo:
            return self._exchange(words)
        told = self._exchange((self._presence.here, words))
        self._presence.meet([host for host, _ in told])
        return [theirs for _, theirs in told]

    def _exchange(self, words: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(pickle.dumps(words)), dtype=torch.uint8)
        # The user's default device is another where he builds models on it.
        sizes = self._all_gather(torch.tensor([mine.numel()], device="cpu"))
        longest = int(max(size.item() for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: mine.numel()] = mine
        rows = self._all_gather(padded)
        return [
            pickle.loads(row[: int(size)].numpy().tobytes())
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        if not self._is_gloo:
            options = _torch_groups.all_gather_options()
            _relay.wait_for(self.group.allgather([rows], [mine], options))
            return rows
        try:
            work = dist.all_gather(rows, mine, group=self.group, async_op=True)
            look_at = time.monotonic() + _LOOK_FIRST_SECONDS
            while not work.is_completed():
                time.sleep(_POLL_SECONDS)
                if time.monotonic() > look_at:
                    self._presence.look()
                    look_at = time.monotonic() + _LOOK_EVERY_SECONDS
            work.wait()
        except _native.PeerError:
            raise
        except RuntimeError as error:
            self._presence.blame(error)
        return rows

    def connect(self, arena_bytes: int, n_ops: int) -> _native.World:
        """Make the world; collective over the group.

        Parameters
        ----------
        arena_bytes : int
            Bytes of shared memory a rank; the same on every rank.
        n_ops : int
            The most operations in flight; the same on every rank.

        Returns
        -------
        paceline._native.World

        Raises
        ------
        paceline.PeerError
            If a rank dies meanwhile.
        """
        if self.is_relayed or self.size == 1:
            return self._connect_alone(arena_bytes, n_ops)
        listener = _native.Listener() if self.rank == 0 else None
        address = listener.address if listener is not None else None
        told = self.exchange(address)
        here, hosts = self._presence.here, self._presence.hosts
        return self._make_world(
            arena_bytes,
            n_ops,
            pids=[host.visible_pid(here) for host in hosts],
            meeting=listener if listener is not None else told[0],
        )

    def _connect_alone(self, arena_bytes: int, n_ops: int) -> _native.World:
        """Make a world that shares no memory: relayed, or of one rank."""
        relay = _relay.Relay(self.group) if self.is_relayed else None
        world = self._make_world(
            arena_bytes,
            n_ops,
            pids=[0] * self.size,
            meeting=_native.Listener(),
            relay=relay,
        )
        if relay is not None:
            relay.serve(world)
        return world

    def _make_world(self, arena_bytes: int, n_ops: int, **ways: Any) -> _native.World:
        world = _native.World(
            rank=self.rank,
            world_size=self.size,
            arena_bytes=arena_bytes,
            n_ops=n_ops,
            timeout=_torch_groups.group_timeout_seconds(self.group),
            **ways,
        )
        _remember(world)
        return world


def connect(
    group: dist.ProcessGroup | None = None,
    arena_bytes: int = 1 << 20,
    n_ops: int = 64,
) -> _native.World:
    """Make a world of raw shared memory over a process group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The default group where none is given.
    arena_bytes : int
        Bytes of shared memory a rank.
    n_ops : int
        The most operations in flight.

    Returns
    -------
    paceline._native.World
    """
    _torch.attach()
    meeting = Meeting(group or _torch_groups.default_group())
    meeting.exchange(None)
    return meeting.connect(arena_bytes, n_ops)


# ---- the end of the process ---------------------------------------------------------


_GOODBYE_PRIORITY = 100
"""Before multiprocessing's own finalizers, which have 10 at the most."""


def _remember(world: _native.World) -> None:
    global _owner_pid
    if not _owner_pid:  # the first world of the process
        os.register_at_fork(after_in_child=_native.after_fork_in_child)
    if _owner_pid != os.getpid():
        _owner_pid = os.getpid()
        atexit.unregister(_say_goodbye)
        atexit.register(_say_goodbye)
        # A process that multiprocessing started ends without calling atexit.
        util.Finalize(None, _say_goodbye, exitpriority=_GOODBYE_PRIORITY)
    _live_worlds.add(world)


def _last_error() -> BaseException | None:
    """Return the exception that ends this process, if one does."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None:
        error = sys.exc_info()[1]  # multiprocessing is on its way out with it
    if isinstance(error, SystemExit):
        error = error.__context__  # torch's spawn exits in its handler
    return error


def _say_goodbye() -> None:
    """Leave every world; peers that wait for this rank get the traceback, if any."""
    if os.getpid() != _owner_pid:
        return  # a forked child: the worlds are its parent's
    error = _last_error()
    words = "".join(traceback.format_exception(error)) if error is not None else None
    for world in list(_live_worlds):
        with suppress(RuntimeError, UnicodeEncodeError):
            if words is not None:
                world.note_exception(words)
            world.leave()
