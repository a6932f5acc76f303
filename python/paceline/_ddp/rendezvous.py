"""From a user's process group to a world of ranks, in shared memory if possible.

The group's own collectives carry the first messages, since its connections already
notice a rank that dies.  Before that the group's store carries each rank's process id,
so that the rank can be named.  If a group takes no CPU tensors (NCCL), the store
carries all.  Later the native world watches the processes itself.
"""

from __future__ import annotations

import enum
import functools
import hmac
import logging
import mmap
import os
import secrets
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline import _messages, _native
from paceline._compat import torch_groups
from paceline._ddp import (
    forks,
    group_comm,
    host_links,
    job_secret,
    live_worlds,
    open_files,
    peers,
)
from paceline._ddp.peers import Host, Peers
from paceline._waiting import Patience

_log = logging.getLogger("paceline")

LINK_SECONDS = 20.0
"""How long hosts may take to connect to one another."""
_OUTCOME_SECONDS = 30.0
"""How long a rank without a world waits for the others' outcomes: none can have made
one, and each soon gives up."""
_INTERRUPTED_SECONDS = 2.0
"""The same for a rank that a signal interrupted: it answers the others, which would
wait for it otherwise."""

_out_of_step: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = (
    weakref.WeakKeyDictionary()
)
"""Groups with a collective that this rank has left, and why: the group's next one would
pair with it."""


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others before they share memory."""

    links: host_links.Offer | None  # of a host's first rank
    lack: str | None  # why this rank can share no memory, or have no links
    reaches_first: bool  # its host's first rank


class Meeting:
    """The ranks of a process group, before they share memory.

    If Gloo carries the group's CPU tensors, or nothing does (NCCL), and all ranks of a
    host have memory to share, they meet there.  Otherwise the group's own collectives
    carry all messages.  If a group has several timeouts, that of `device_type` counts.

    Ranks that have met before, `met`, meet through the store: in the group, work of a
    step that failed, or the user's own collectives, may come first on some ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device_type: str = "cpu",
        met: peers.Met | None = None,
    ) -> None:
        if group in _out_of_step and met is None:
            raise RuntimeError(
                "process_group cannot be used any more: a wrapper's construction was "
                f"cut off on this rank ({_out_of_step[group]}), and its ranks are out "
                "of step since: destroy it and make another, on all ranks"
            )
        self.group = group
        self.rank = torch_groups.group_rank(group)
        self.size = int(group.size())
        self._seconds = torch_groups.group_timeout_seconds(group, device_type)
        self._memory_problem = self._links_problem = ""
        self._has_cpu = not torch_groups.is_device_bound(group)
        self._is_known_kind = (
            not self._has_cpu or torch_groups.cpu_backend_name(group) == "gloo"
        )
        # The key of the ranks' handshakes, and the socket for those of this host.
        self._secret = secrets.token_bytes(job_secret.KEY_BYTES)
        self._listener: _native.Listener | None = None
        self._lack: str | None = None
        self._has_met = self.size == 1 or not self._is_known_kind
        self._is_connecting = False  # from then on, other ranks may have their worlds
        self._met = met
        if self.size > 1 and self._is_known_kind:
            try:
                open_files.make_room(1)
                self._listener = _native.Listener()
            except OSError as error:
                self._lack = str(error)
            address = self._listener.address if self._listener is not None else ""
            self._peers = Peers(
                group, self.rank, self.size, self._seconds, address, met
            )
            if not self._has_cpu and self._peers.store is None:
                raise NotImplementedError(
                    "process_group takes no CPU tensors, and torch gives no access to "
                    "its store: make it with torch.distributed.new_group()"
                )

    @property
    def uses_group(self) -> bool:
        """Whether collectives of a group carry a step's messages.

        Known after :meth:`exchange`, except for a lack of memory, which :meth:`connect`
        finds.
        """
        if not self._is_known_kind:
            return True
        if self.size == 1:
            return False
        first, *others = self._peers.hosts
        return (
            bool(self._memory_problem)
            or self.size > _native.MAX_SHARED_MEMORY_RANKS
            or not all(host.shares_memory_with(first) for host in others)
        )

    @property
    def ranks_by_host(self) -> list[int]:
        """How many ranks each host has if links join the hosts; else empty.

        Each host has consecutive ranks.  Links send sums between hosts over sockets, as
        Gloo would.  If Gloo's sockets are encrypted, no links join the hosts.
        """
        if not self._is_known_kind or self._links_problem:
            return []
        if self.size == 1 or os.environ.get("GLOO_DEVICE_TRANSPORT") == "TCP_TLS":
            return []
        return peers.count_by_host(self._peers.hosts)

    def close(self) -> None:
        """Stop listening for other ranks."""
        self._listener = None

    def give_up(self, why: BaseException) -> None:
        """Make the others raise that this rank has left the meeting."""
        if self.size > 1 and self._is_known_kind:
            self._peers.tell_of_end(why)

    def may_be_behind(self, problem: BaseException) -> bool:
        """Tell whether other ranks may have their worlds, although this one has not."""
        return self._is_connecting and problem is not self._peers.gone

    def keep(self) -> peers.Met | None:
        """Return what a rank keeps for the next meeting; None if it uses no store."""
        if self.size == 1 or not self._is_known_kind:
            return None
        return self._peers.keep()

    def exchange(
        self, message: Any, kind: Any = Any, seconds: float | None = None
    ) -> list[Any]:
        """Send one message to all ranks; return every rank's, by rank.

        `message` is plain data, and `kind` its type: see ``paceline._messages``.  If a
        rank dies meanwhile, or takes more than `seconds` (default: the group's
        timeout), or sends something else, this raises ``PeerError``.
        """
        if self.size == 1:
            return [message]
        if self._has_met:
            return self._exchange(message, kind, seconds)
        mine = (self._peers.here, job_secret.Share.own(), message)
        kind = tuple[Host, job_secret.Share, kind]
        hosts, shares, told = zip(*self._exchange(mine, kind, seconds), strict=True)
        self._peers.meet(list(hosts))
        self._secret = job_secret.key_of(shares)
        self._has_met = True
        return list(told)

    def _exchange(self, message: Any, kind: Any, seconds: float | None) -> list[Any]:
        packed = _messages.pack(message)
        who = f"rank {self.rank}: rank"
        goes_by_store = not self._has_cpu or self._met is not None
        if goes_by_store and self._peers.store is not None:
            rows = self._peers.all_gather(packed, seconds or self._seconds)
        else:
            patience = None if seconds is None else Patience(seconds)
            try:
                rows = _messages.all_gather(
                    packed, lambda mine: self._all_gather(mine, patience), who
                )
            except BaseException as error:
                _out_of_step[self.group] = peers.words_of(error)
                if not isinstance(error, RuntimeError):
                    self.give_up(error)
                raise
        if self._is_known_kind:
            return [self._peers.read(row, kind, r) for r, row in enumerate(rows)]
        return [_messages.unpack(row, kind, f"{who} {r}") for r, row in enumerate(rows)]

    def _all_gather(
        self, mine: torch.Tensor, patience: Patience | None
    ) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        if not self._is_known_kind:
            options = torch_groups.all_gather_options()
            work = forks.note(self.group.allgather([rows], [mine], options))
            group_comm.wait_for(work)
            return rows
        try:
            work = dist.all_gather(rows, mine, group=self.group, async_op=True)
            forks.note(work)
            check_at = time.monotonic() + peers.CHECK_FIRST_SECONDS
            while not work.is_completed():
                time.sleep(peers.POLL_SECONDS)
                if time.monotonic() > check_at:
                    self._peers.check()
                    check_at = time.monotonic() + peers.CHECK_EVERY_SECONDS
                if patience is not None and patience.left() < 0:
                    raise _native.PeerTimeoutError(
                        f"rank {self.rank}: the other ranks have not reported how "
                        "their construction ended"
                    )
            work.wait()
        except _native.PeerError:
            raise
        except RuntimeError as error:
            self._peers.blame(error)
        return rows

    def connect(self, arena_bytes: int, n_ops: int, **device: Any) -> _native.RankWorld:
        """Make the world; collective over the group.

        Every rank gives the same bytes of shared memory and number of operations in
        flight; `device` holds ``paceline._native.RankWorld``'s arguments for a GPU.
        """
        self._is_connecting = True
        sizes = {"arena_bytes": arena_bytes, "n_ops": n_ops, **device}
        world = None
        if self._met is not None and self._met.uses_group:
            self._memory_problem = "as in the world that failed"
        elif self.size > 1 and self._is_known_kind:
            world = self._connect_by_memory(sizes)
            if self.uses_group and self._met is None:
                self._warn(is_by_group=world is None)
        return world if world is not None else self._connect_alone(sizes)

    def _connect_by_memory(self, sizes: dict[str, Any]) -> _native.RankWorld | None:
        """Make a world of ranks that share each host's memory; links join the hosts.

        Return None on every rank if one of them has no memory or no link.  Two machines
        with one boot id, such as clones, seem to be one host: the ranks that do not
        reach their host's first rank are counted as of another host then.
        """
        n_ranks = self.ranks_by_host if self.uses_group else [self.size]
        if not n_ranks:
            return None
        firsts = [sum(n_ranks[:h]) for h in range(len(n_ranks))]
        host = max(h for h, first in enumerate(firsts) if first <= self.rank)
        first, n_here = firsts[host], n_ranks[host]
        is_first, has_links = self.rank == first, len(n_ranks) > 1
        links, lack, reaches_first = None, self._lack, True
        # Each rank has a process descriptor and a socket for meeting.  A first rank's
        # links are duplicated on their way to the core.
        n_links = host_links.N_STREAMS * len(n_ranks) if is_first and has_links else 0
        try:
            open_files.make_room(2 * n_here + 2 * n_links)
            links = host_links.LinkListener(self._peers.check) if n_links else None
            if not is_first and self._peers.hosts[first].listener:
                reaches_first = self._peers.hosts[first].is_reachable()
        except OSError as error:
            lack = str(error)
        mine = _Offer(links.offer if links else None, lack, reaches_first)
        offers = self.exchange(mine, _Offer)
        lost = [r for r, offer in enumerate(offers) if not offer.reaches_first]
        if strays := [r for r in lost if r not in firsts]:
            if links is not None:
                links.close()
            self._peers.part(strays)
            return self._connect_by_memory(sizes)
        sockets: list[Any] = []
        world = problem = None
        may_lack = True  # an OS error may mean a lack, but not of a GPU's memory
        try:
            lacks = [f"rank {r}: {o.lack}" for r, o in enumerate(offers) if o.lack]
            every = [o.links for r, o in enumerate(offers) if r in firsts and o.links]
            if has_links and len(every) < len(firsts):
                lacks.append("a first rank offers no address")
            if lacks:
                self._do_without(lacks[0], has_links)
                return None
            if links is not None:
                seconds = min(self._seconds / 3.0, LINK_SECONDS)
                sockets = links.connect_all(every, host, self._secret, seconds)
            names = (peers.name_of_host(h, firsts[h], n) for h, n in enumerate(n_ranks))
            files = [-1 if each is None else each.fileno() for each in sockets]
            here, hosts = self._peers.here, self._peers.hosts
            may_lack = "device" not in sizes
            meeting = self._listener if self.rank == first else hosts[first].listener
            world = self._make_world(
                sizes,
                pids=[h.visible_pid(here) for h in hosts[first : first + n_here]],
                meeting=meeting if n_here > 1 else None,
                hosts=(n_ranks, tuple(names), files) if has_links else None,
            )
        except BaseException as error:
            may_lack = may_lack or _lacks_shared_memory(sizes["arena_bytes"])
            problem = error
        finally:
            self.close()  # later callers find no listener
            host_links.close_all(sockets)
            if links is not None:
                links.close()
        if problem is None and not has_links:
            return world  # all ranks have a world, or none
        patience = None if has_links else _OUTCOME_SECONDS
        return self._settle(world, problem, may_lack, has_links, patience)

    def _do_without(self, why: str, has_links: bool) -> None:
        if self._met is not None:  # the world that failed had it
            raise _native.PeerError(f"rank {self.rank}: no new world: {why}")
        if has_links:
            self._links_problem = f"hosts cannot connect: {why}"
        else:
            self._memory_problem = why

    def _settle(
        self,
        world: _native.RankWorld | None,
        problem: BaseException | None,
        may_lack: bool,
        has_links: bool,
        seconds: float | None = None,
    ) -> _native.RankWorld | None:
        """Send this rank's outcome; return the world if every rank has one.

        The gravest outcome decides for all ranks: see `_Outcome`.
        """
        outcome = _Outcome.of(problem, may_lack)
        is_interrupted = problem is not None and not isinstance(problem, Exception)
        if is_interrupted:
            seconds = _INTERRUPTED_SECONDS
        try:
            mine = (outcome, str(problem or ""))
            received = self.exchange(mine, tuple[_Outcome, str], seconds)
        except RuntimeError:  # a rank is gone, or has not failed
            if problem is not None and is_interrupted:
                self.give_up(problem)
            lacks = OSError if self._met is None else (OSError, _native.PeerError)
            if problem is None or (has_links and isinstance(problem, lacks)):
                raise  # this rank had no links, or another gave up first
            raise problem from None
        gravest = max(each for each, _ in received)
        if gravest is _Outcome.MADE:
            return world
        causes = [
            (r, text) for r, (each, text) in enumerate(received) if each is gravest
        ]
        is_broken = gravest is _Outcome.FOLLOWS and not has_links
        if gravest is _Outcome.FAILS or is_broken:
            if problem is not None and outcome is gravest:
                raise problem
            rank, text = causes[0]
            raise _native.PeerError(f"rank {rank} could not make its world: {text}")
        if world is not None:
            world.leave()
        self._do_without(
            "; ".join(f"rank {r}: {text}" for r, text in causes[:4]), has_links
        )
        return None

    def _why_no_memory_is_shared(self) -> str | None:
        """Return why ranks of one host share no memory; None with several hosts."""
        first, *others = self._peers.hosts
        differences = [host.difference_to(first) for host in others]
        for rank, difference in enumerate(differences, 1):
            if difference is not None and difference != peers.OTHER_HOSTS:
                return f"ranks 0 and {rank} are {difference}"
        if peers.OTHER_HOSTS in differences:
            return None
        return f"they are more than {_native.MAX_SHARED_MEMORY_RANKS}"

    def _warn(self, *, is_by_group: bool) -> None:
        """Warn, on rank 0, why ranks share no memory, and what they use."""
        why = self._memory_problem or self._why_no_memory_is_shared()
        reasons = "; ".join(filter(None, (why, self._links_problem)))
        how = "they talk by sockets between them"
        if is_by_group:
            how = "they talk by the process group's own collectives"
        if self.rank == 0 and reasons:
            _log.warning("the ranks share no memory (%s): %s", reasons, how)

    def _connect_alone(self, sizes: dict[str, Any]) -> _native.RankWorld:
        """Make a world that shares no memory: over a group, or of one rank."""
        comm = group_comm.GroupComm(self._group_of_hosts()) if self.uses_group else None
        ways = {"pids": [0] * self.size, "meeting": None, "group_comm": comm}
        world = problem = None
        try:
            world = self._make_world(sizes, **ways)
        except BaseException as error:
            problem = error
        world = self._settle(world, problem, may_lack=False, has_links=False)
        assert world is not None  # else _settle() raises
        if comm is not None:
            comm.serve(world)
        return world

    def _group_of_hosts(self) -> Any:
        """Return the group that carries messages: the user's, or one over Gloo."""
        if self._has_cpu:
            return self.group
        return torch_groups.make_gloo(
            self._peers.store, self.rank, self.size, self._seconds
        )

    def _make_world(self, sizes: dict[str, Any], **ways: Any) -> _native.RankWorld:
        world = _native.RankWorld(
            rank=self.rank,
            world_size=self.size,
            timeout=self._seconds,
            prove=functools.partial(hmac.digest, self._secret, digest="sha256"),
            **sizes,
            **ways,
        )
        live_worlds.add(world)
        return world


class _Outcome(enum.IntEnum):
    """The outcome of making a world on one rank, the gravest last.

    ======= =================================== =======================================
    on one  means                               then all
    ======= =================================== =======================================
    MADE    it has its world                    have theirs
    FOLLOWS another has failed (``PeerError``)  raise; over links, as LACKS
    LACKS   it has no memory to share, no link  go on by the group
    FAILS   any other error                     raise: it its own error, others its name
    ======= =================================== =======================================
    """

    MADE = 0
    FOLLOWS = 1
    LACKS = 2
    FAILS = 3

    @classmethod
    def of(cls, problem: BaseException | None, may_lack: bool) -> _Outcome:
        if problem is None:
            return cls.MADE
        if isinstance(problem, _native.PeerError):
            return cls.FOLLOWS
        is_lack = may_lack and isinstance(problem, (OSError, MemoryError))
        return cls.LACKS if is_lack else cls.FAILS


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
