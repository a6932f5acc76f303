"""From a user's process group to a world of ranks: in shared memory, where it can be.

The group's own collectives carry the first words, since its connections already notice
a rank that dies; the group's store carries each rank's process id beforehand, so that
the rank can be named.  Where a group takes no CPU tensors (NCCL) the store carries all.
From then on the native world watches the processes itself.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import time
import traceback
import weakref
from contextlib import suppress
from multiprocessing import util
from typing import Any

import torch
import torch.distributed as dist

from paceline import _native, _relay, _torch, _torch_groups
from paceline._presence import (
    LOOK_EVERY_SECONDS,
    LOOK_FIRST_SECONDS,
    POLL_SECONDS,
    Presence,
)

_live_worlds: weakref.WeakSet[_native.World] = weakref.WeakSet()
_owner_pid = 0


class Meeting:
    """The ranks of a process group, before they share memory.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The user's group.  Where Gloo carries its CPU tensors, or nothing does (NCCL),
        and all ranks are on one host, they meet in shared memory; of any other kind its
        own collectives carry all that they say.
    device_type : str, default "cpu"
        Of the tensors to come: its timeout counts where a group has several.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    is_relayed : bool
        Whether collectives of a group carry what ranks say in a step; known after
        :meth:`exchange`.
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str = "cpu") -> None:
        self.group = group
        self.rank = _torch_groups.group_rank(group)
        self.size = int(group.size())
        self._seconds = _torch_groups.group_timeout_seconds(group, device_type)
        self._has_cpu = not _torch_groups.is_device_bound(group)
        self._has_presence = (
            not self._has_cpu or _torch_groups.cpu_backend_name(group) == "gloo"
        )
        if self.size > 1 and self._has_presence:
            self._presence = Presence(group, self.rank, self.size)
            if not self._has_cpu and self._presence.store is None:
                raise NotImplementedError(
                    "process_group takes no CPU tensors, and torch shows no store of "
                    "it to meet by: make it by torch.distributed.new_group()"
                )

    @property
    def is_relayed(self) -> bool:
        """Whether collectives of a group carry a step's words; see the class."""
        if not self._has_presence:
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
        if not self._has_presence:
            return self._exchange(words)
        told = self._exchange((self._presence.here, words))
        self._presence.meet([host for host, _ in told])
        return [theirs for _, theirs in told]

    def _exchange(self, words: Any) -> list[Any]:
        pickled = pickle.dumps(words)
        if not self._has_cpu:
            told = self._presence.tell(pickled, self._seconds)
            return [pickle.loads(row) for row in told]
        mine = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
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
        if not self._has_presence:
            options = _torch_groups.all_gather_options()
            _relay.wait_for(self.group.allgather([rows], [mine], options))
            return rows
        try:
            work = dist.all_gather(rows, mine, group=self.group, async_op=True)
            look_at = time.monotonic() + LOOK_FIRST_SECONDS
            while not work.is_completed():
                time.sleep(POLL_SECONDS)
                if time.monotonic() > look_at:
                    self._presence.look()
                    look_at = time.monotonic() + LOOK_EVERY_SECONDS
            work.wait()
        except _native.PeerError:
            raise
        except RuntimeError as error:
            self._presence.blame(error)
        return rows

    def connect(self, arena_bytes: int, n_ops: int, **device: Any) -> _native.World:
        """Make the world; collective over the group.

        Parameters
        ----------
        arena_bytes : int
            Bytes of shared memory a rank; the same on every rank.
        n_ops : int
            The most operations in flight; the same on every rank.
        **device
            Of a world whose gradients are on a GPU: see ``paceline._native.World``.

        Returns
        -------
        paceline._native.World

        Raises
        ------
        paceline.PeerError
            If a rank dies meanwhile.
        """
        if self.is_relayed or self.size == 1:
            return self._connect_alone(arena_bytes, n_ops, device)
        listener = _native.Listener() if self.rank == 0 else None
        address = listener.address if listener is not None else None
        told = self.exchange(address)
        here, hosts = self._presence.here, self._presence.hosts
        return self._make_world(
            arena_bytes,
            n_ops,
            pids=[host.visible_pid(here) for host in hosts],
            meeting=listener if listener is not None else told[0],
            **device,
        )

    def _connect_alone(
        self, arena_bytes: int, n_ops: int, device: dict[str, Any]
    ) -> _native.World:
        """Make a world that shares no memory: relayed, or of one rank."""
        relay = _relay.Relay(self._relay_group()) if self.is_relayed else None
        world = self._make_world(
            arena_bytes,
            n_ops,
            pids=[0] * self.size,
            meeting=_native.Listener(),
            relay=relay,
            **device,
        )
        if relay is not None:
            relay.serve(world)
        return world

    def _relay_group(self) -> Any:
        """Return what carries host words between hosts: the group, or one over Gloo."""
        if self._has_cpu:
            return self.group
        return _torch_groups.make_gloo(
            self._presence.store, self.rank, self.size, self._seconds
        )

    def _make_world(self, arena_bytes: int, n_ops: int, **ways: Any) -> _native.World:
        world = _native.World(
            rank=self.rank,
            world_size=self.size,
            arena_bytes=arena_bytes,
            n_ops=n_ops,
            timeout=self._seconds,
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
