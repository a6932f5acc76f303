"""From a user's process group to a world of ranks: in shared memory, where it can be.

The group's own collectives carry the first messages, since its connections already
notice a rank that dies; the group's store carries each rank's process id beforehand, so
that the rank can be named.  Where a group takes no CPU tensors (NCCL) the store carries
all.
From then on the native world watches the processes itself.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from paceline import _native
from paceline._compat import torch_groups
from paceline._ddp import group_comm, host_links, live_worlds, open_files
from paceline._ddp.peers import (
    CHECK_EVERY_SECONDS,
    CHECK_FIRST_SECONDS,
    OTHER_HOSTS,
    POLL_SECONDS,
    Peers,
    count_by_host,
    name_of_host,
    words_of,
)

_log = logging.getLogger("paceline")

LINK_SECONDS = 20.0
"""How long hosts may take to connect to one another."""
OUTCOME_SECONDS = 30.0
"""How long a rank whose world could not be made waits for what the others say of it:
none can have made it, and each soon gives up."""
_INTERRUPTED_SECONDS = 2.0
"""The same for one that a signal has interrupted: it answers the others, who would wait
for it otherwise."""

_out_of_step: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = (
    weakref.WeakKeyDictionary()
)
"""Groups with a collective that this rank has left, which the next would be taken for,
and why."""


class Meeting:
    """The ranks of a process group, before they share memory.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The user's group.  Where Gloo carries its CPU tensors, or nothing does (NCCL),
        and all ranks are on one host and have memory to share, they meet there;
        otherwise the group's own collectives carry all messages.
    device_type : str, default "cpu"
        Of the tensors to come: its timeout counts where a group has several.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    uses_group : bool
        Whether collectives of a group carry the messages of a step; known after
        :meth:`exchange`, but for a lack of memory, which :meth:`connect` finds.
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str = "cpu") -> None:
        if group in _out_of_step:
            raise RuntimeError(
                "process_group cannot be used any more: a wrapper's construction was "
                f"cut off on this rank ({_out_of_step[group]}), and its ranks are out "
                "of step since: destroy it and make another, on all ranks"
            )
        self.group = group
        self.rank = torch_groups.group_rank(group)
        self.size = int(group.size())
        self._seconds = torch_groups.group_timeout_seconds(group, device_type)
        self._lacks_memory = False
        self._links_problem = ""
        self._has_cpu = not torch_groups.is_device_bound(group)
        self._is_known_kind = (
            not self._has_cpu or torch_groups.cpu_backend_name(group) == "gloo"
        )
        if self.size > 1 and self._is_known_kind:
            self._peers = Peers(group, self.rank, self.size)
            if not self._has_cpu and self._peers.store is None:
                raise NotImplementedError(
                    "process_group takes no CPU tensors, and torch shows no store of "
                    "it to meet by: make it by torch.distributed.new_group()"
                )

    @property
    def uses_group(self) -> bool:
        """Whether collectives of a group carry a step's messages; see the class."""
        if not self._is_known_kind:
            return True
        if self.size == 1:
            return False
        first, *others = self._peers.hosts
        return (
            self._lacks_memory
            or self.size > _native.MAX_SHARED_MEMORY_RANKS
            or not all(host.shares_memory_with(first) for host in others)
        )

    @property
    def ranks_by_host(self) -> list[int]:
        """How many ranks each host has, where links join them; else empty.

        A host has those behind the last one's; their sums go between hosts by sockets,
        which Gloo's would be, too: not where these are encrypted.
        """
        if not self._is_known_kind or self._links_problem:
            return []
        if self.size == 1 or os.environ.get("GLOO_DEVICE_TRANSPORT") == "TCP_TLS":
            return []
        return count_by_host(self._peers.hosts)

    def exchange(self, message: Any, seconds: float | None = None) -> list[Any]:
        """Send one picklable object to all ranks; return every rank's, by rank.

        Parameters
        ----------
        message : object
            Picklable.
        seconds : float, optional
            How long the others may take; by default as long as the group's timeout.

        Raises
        ------
        paceline.PeerError
            If a rank dies meanwhile; a ``PeerTimeoutError`` if the others take longer.
        """
        if self.size == 1:
            return [message]
        if not self._is_known_kind:
            return self._exchange(message, seconds)
        received = self._exchange((self._peers.here, message), seconds)
        self._peers.meet([host for host, _ in received])
        return [theirs for _, theirs in received]

    def _exchange(self, message: Any, seconds: float | None) -> list[Any]:
        pickled = pickle.dumps(message)
        if not self._has_cpu:
            received = self._peers.all_gather(pickled, seconds or self._seconds)
            return [pickle.loads(row) for row in received]
        try:
            return self._exchange_by_group(pickled, seconds)
        except BaseException as error:
            _out_of_step[self.group] = words_of(error)
            if not isinstance(error, RuntimeError):
                self._tell_of_end(error)
            raise

    def _tell_of_end(self, why: BaseException) -> None:
        if self.size > 1 and self._is_known_kind:
            self._peers.tell_of_end(why)

    def _exchange_by_group(self, pickled: bytes, seconds: float | None) -> list[Any]:
        until = None if seconds is None else time.monotonic() + seconds
        mine = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        # The user's default device is another where he builds models on it.
        sizes = self._all_gather(torch.tensor([mine.numel()], device="cpu"), until)
        longest = int(max(size.item() for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: mine.numel()] = mine
        rows = self._all_gather(padded, until)
        return [
            pickle.loads(row[: int(size)].numpy().tobytes())
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _all_gather(
        self, mine: torch.Tensor, until: float | None
    ) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        if not self._is_known_kind:
            options = torch_groups.all_gather_options()
            group_comm.wait_for(self.group.allgather([rows], [mine], options))
            return rows
        try:
            work = dist.all_gather(rows, mine, group=self.group, async_op=True)
            check_at = time.monotonic() + CHECK_FIRST_SECONDS
            while not work.is_completed():
                time.sleep(POLL_SECONDS)
                if time.monotonic() > check_at:
                    self._peers.check()
                    check_at = time.monotonic() + CHECK_EVERY_SECONDS
                if until is not None and time.monotonic() > until:
                    raise _native.PeerTimeoutError(
                        f"rank {self.rank}: the other ranks have not said how their "
                        "construction went"
                    )
            work.wait()
        except _native.PeerError:
            raise
        except RuntimeError as error:
            self._peers.blame(error)
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
        if self.size > 1 and not self.uses_group:
            world = self._connect_by_memory(arena_bytes, n_ops, device)
            if world is not None:
                return world
        elif self.size > 1 and self._is_known_kind:
            world = None
            if self.ranks_by_host:
                world = self._connect_by_links(arena_bytes, n_ops, device)
            self._warn(self._why_no_memory_is_shared(), by_group=world is None)
            if world is not None:
                return world
        return self._connect_alone(arena_bytes, n_ops, device)

    def _connect_by_memory(
        self, arena_bytes: int, n_ops: int, device: dict[str, Any]
    ) -> _native.World | None:
        """Make a world in shared memory; None on every rank where one can have none."""
        listener = lack = None
        try:
            # Of each rank its process, and the socket that it is met by.
            open_files.make_room(2 * self.size)
            listener = _native.Listener() if self.rank == 0 else None
        except OSError as error:
            lack = str(error)
        address = listener.address if listener is not None else None
        offers = self.exchange((address, lack))
        lacking = _who_lacks(offers)
        if lacking is not None:
            self._lacks_memory = True
            self._warn(lacking)
            return None
        address, _ = offers[0]
        here, hosts = self._peers.here, self._peers.hosts
        try:
            return self._make_world(
                arena_bytes,
                n_ops,
                pids=[host.visible_pid(here) for host in hosts],
                meeting=listener if listener is not None else address,
                **device,
            )
        except BaseException as error:
            del listener  # who still connects finds that nobody listens
            # A GPU's memory may have run out instead.
            may_lack = not device or _lacks_shared_memory(arena_bytes)
            self._raise_unless_memory_lacks(error, may_lack)
            return None

    def _connect_by_links(
        self, arena_bytes: int, n_ops: int, device: dict[str, Any]
    ) -> _native.World | None:
        """Make a world of several hosts; None on every rank where they have no links.

        Where one rank's construction fails, others may have succeeded: all say so.
        """
        n_ranks = self.ranks_by_host
        firsts = [sum(n_ranks[:h]) for h in range(len(n_ranks))]
        host = max(h for h, first in enumerate(firsts) if first <= self.rank)
        first, n_here = firsts[host], n_ranks[host]
        is_first = self.rank == first
        listener = links = lack = world = None
        problem: BaseException | None = None
        may_lack = True
        sockets: list[Any] = []
        # A first rank's sockets are duplicated on their way to the core.
        n_sockets = 2 * host_links.N_STREAMS * len(n_ranks) if is_first else 0
        try:
            open_files.make_room(n_sockets + 2 * n_here)
            links = host_links.LinkListener() if is_first else None
            listener = _native.Listener() if is_first and n_here > 1 else None
        except OSError as error:
            lack = str(error)
        address = listener.address if listener is not None else None
        offers = self.exchange(((address, links.offer if links else None), lack))
        try:
            lacking = _who_lacks(offers)
            if lacking is not None:
                self._links_problem = f"hosts cannot connect: {lacking}"
                return None
            if links is not None:
                seconds = min(self._seconds / 3.0, LINK_SECONDS)
                every = [offers[r][0][1] for r in firsts]
                sockets = links.connect_all(every, host, seconds)
            here, hosts = self._peers.here, self._peers.hosts
            may_lack = not device
            world = self._make_world(
                arena_bytes,
                n_ops,
                pids=[h.visible_pid(here) for h in hosts[first : first + n_here]],
                meeting=listener if is_first else offers[first][0][0],
                hosts=(
                    n_ranks,
                    tuple(name_of_host(h, firsts[h], n) for h, n in enumerate(n_ranks)),
                    [-1 if each is None else each.fileno() for each in sockets],
                ),
                **device,
            )
        except BaseException as error:
            del listener  # who still connects finds that nobody listens
            problem = error
            # A GPU's memory may have run out instead.
            may_lack = may_lack or _lacks_shared_memory(arena_bytes)
        finally:
            host_links.close_all(sockets)
            if links is not None:
                links.close()
        outcome = "made" if problem is None else _outcome_of(problem, may_lack)
        return self._settle(world, outcome, problem)

    def _settle(
        self, world: _native.World | None, outcome: str, problem: BaseException | None
    ) -> _native.World | None:
        """Return the world where every rank has one; None where links are lacking."""
        is_interrupted = problem is not None and not isinstance(problem, Exception)
        seconds = _INTERRUPTED_SECONDS if is_interrupted else None
        try:
            received = self.exchange((outcome, str(problem or "")), seconds)
        except RuntimeError:  # a rank is gone
            if problem is not None and is_interrupted:
                self._tell_of_end(problem)
            if problem is None or isinstance(problem, OSError):  # it had no links
                raise
            raise problem from None
        bad = [(r, *row) for r, row in enumerate(received) if row[0] != "made"]
        if not bad:
            return world
        if problem is not None and outcome == "fails":
            raise problem
        causes = [row for row in bad if row[1] != "follows another"] or bad
        rank, what, message = max(causes, key=lambda row: row[1] == "fails")
        if what == "fails":
            raise _native.PeerError(f"rank {rank} could not make its world: {message}")
        if world is not None:
            world.leave()
        texts = "; ".join(f"rank {r}: {text}" for r, _, text in causes[:4])
        self._links_problem = f"hosts cannot connect: {texts}"
        return None

    def _raise_unless_memory_lacks(
        self, problem: BaseException, may_lack: bool
    ) -> None:
        """Raise why the world was not made, unless a rank has no memory to share.

        Where one rank's construction fails, none has succeeded, so all come here.
        """
        is_interrupted = not isinstance(problem, Exception)
        seconds = _INTERRUPTED_SECONDS if is_interrupted else OUTCOME_SECONDS
        try:
            received = self.exchange(
                (_outcome_of(problem, may_lack), str(problem)), seconds
            )
        except RuntimeError:  # a rank is gone, or has not failed
            if is_interrupted:
                self._tell_of_end(problem)
            raise problem from None
        lacks = [
            f"rank {rank}: {message}"
            for rank, (what, message) in enumerate(received)
            if what == "lacks memory"
        ]
        if not lacks or any(what == "fails" for what, _ in received):
            raise problem
        self._lacks_memory = True
        self._warn(lacks[0])

    def _why_no_memory_is_shared(self) -> str | None:
        """Return why ranks of one host share no memory; None: they are on several."""
        first, *others = self._peers.hosts
        differences = [host.difference_to(first) for host in others]
        for rank, difference in enumerate(differences, 1):
            if difference is not None and difference != OTHER_HOSTS:
                return f"ranks 0 and {rank} are {difference}"
        if OTHER_HOSTS in differences:
            return None
        return f"they are more than {_native.MAX_SHARED_MEMORY_RANKS}"

    def _warn(self, reason: str | None, by_group: bool = True) -> None:
        """Say, on rank 0, why ranks share no memory, and by what they talk instead."""
        reasons = filter(None, (reason, self._links_problem))
        how = "they talk by sockets between them"
        if by_group:
            how = "they talk by the process group's own collectives"
        if self.rank == 0 and (reason or self._links_problem):
            _log.warning("the ranks share no memory (%s): %s", "; ".join(reasons), how)

    def _connect_alone(
        self, arena_bytes: int, n_ops: int, device: dict[str, Any]
    ) -> _native.World:
        """Make a world that shares no memory: over a group, or of one rank."""
        comm = group_comm.GroupComm(self._group_of_hosts()) if self.uses_group else None
        world = problem = None
        try:
            world = self._make_world(
                arena_bytes,
                n_ops,
                pids=[0] * self.size,
                meeting=None,
                group_comm=comm,
                **device,
            )
        except BaseException as error:
            problem = error
        outcome = "made" if problem is None else _outcome_of(problem, may_lack=False)
        world = self._settle(world, outcome, problem)
        assert world is not None  # where one rank has none, this raises
        if comm is not None:
            comm.serve(world)
        return world

    def _group_of_hosts(self) -> Any:
        """Return what carries messages between hosts: the group, or one over Gloo."""
        if self._has_cpu:
            return self.group
        return torch_groups.make_gloo(
            self._peers.store, self.rank, self.size, self._seconds
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
        live_worlds.add(world)
        return world


def _who_lacks(offers: list[tuple[Any, str | None]]) -> str | None:
    """Return which rank cannot be met, and why; None where all can."""
    lacks = (f"rank {r}: {lack}" for r, (_, lack) in enumerate(offers) if lack)
    return next(lacks, None)


def _outcome_of(problem: BaseException, may_lack: bool) -> str:
    if isinstance(problem, _native.PeerError):
        return "follows another"
    if may_lack and isinstance(problem, (OSError, MemoryError)):
        return "lacks memory"
    return "fails"


def _lacks_shared_memory(n_bytes: int) -> bool:
    """Tell whether processes cannot share so much, as csrc/comm/segment.c makes it."""
    try:
        fd = os.memfd_create("paceline")
        try:
            os.ftruncate(fd, max(n_bytes, 1))
            mmap.mmap(fd, max(n_bytes, 1)).close()
        finally:
            os.close(fd)
    except OSError:
        return True
    return False
