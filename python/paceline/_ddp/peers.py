"""The ranks of a process group: their hosts, whether each runs, and their messages.

Messages go through the group's own collectives if those take CPU tensors, else through
its store.  NCCL would make a communicator for them, and could not be left.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import secrets
import socket
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch.distributed as dist

from paceline import _environment, _messages, _native
from paceline._compat import torch_groups
from paceline._ddp import forks, host_links
from paceline._waiting import Patience

_log = logging.getLogger("paceline")

POLL_SECONDS = 0.002
CHECK_FIRST_SECONDS = 0.01
CHECK_EVERY_SECONDS = 0.1
_BLAME_SECONDS = 0.6
"""How long a failed exchange searches for the rank that caused it."""
_LAST_CHECK_SECONDS = 2.0
"""How long the store's process may take to end after the store is lost."""
_READ_TOGETHER = 4096
"""How many hosts all ranks together request from the store at a time: one process
serves it, and requests of each rank for each other grow with the square."""
_MOST_NAMED = 8
_PROBE_SECONDS = 2.0

OTHER_HOSTS = "on other hosts"
_NAMESPACES = ("net", "pid", "user")

_Answer = TypeVar("_Answer")

_wrap_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)


def words_of(error: BaseException) -> str:
    """Return an exception's type and text, as the last line of a traceback."""
    return traceback.format_exception_only(error)[-1].strip()


@dataclass(frozen=True)
class Host:
    """A rank's host: the values that must agree for ranks to share memory."""

    boot: str  # the kernel's boot id; random if there is a `problem`
    network: int  # namespace, in which abstract sockets live
    processes: int  # namespace, in which process ids are valid
    users: int  # namespace, in which user ids are valid
    user: int  # ranks of other users cannot share memory
    pid: int  # in the rank's own namespace
    problem: str = ""  # why the rank counts as a separate host: what could not be read
    address: str = ""  # tells machines with one boot id (clones) apart
    listener: str = ""  # name of the Unix socket that the rank listens on

    def __post_init__(self) -> None:
        numbers = (self.network, self.processes, self.users, self.user, self.pid)
        is_whole = re.fullmatch("(paceline-[0-9a-f]{32})?", self.listener)
        if not is_whole or min(numbers) < 0 or self.pid >= 1 << 31:
            raise ValueError("a host that cannot be")

    @classmethod
    def here(cls) -> Host:
        """Describe this process."""
        user, pid = os.geteuid(), os.getpid()
        try:
            network, processes, users = (
                os.stat(f"/proc/self/ns/{kind}").st_ino for kind in _NAMESPACES
            )
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                boot = file.read().strip()
            address = host_links.own_addresses()[0]
            return cls(boot, network, processes, users, user, pid, address=address)
        except OSError as error:
            return cls(secrets.token_hex(16), 0, 0, 0, user, pid, str(error))

    def shares_memory_with(self, other: Host) -> bool:
        """Tell whether ranks there and here can map the same memory."""
        return self.difference_to(other) is None

    def difference_to(self, other: Host) -> str | None:
        """Return why the two share no memory, or None if they can."""
        if self.problem or other.problem:
            return f"on unknown hosts: {self.problem or other.problem}"
        if self.boot != other.boot:
            return OTHER_HOSTS
        if self.network != other.network:
            return "in other network namespaces"
        if (self.users, self.user) != (other.users, other.user):
            return "other users"
        return None

    def visible_pid(self, viewer: Host) -> int:
        """Return the process id as ``viewer`` sees it, or 0 if it cannot."""
        same = ("boot", "processes", "address")
        is_near = all(getattr(self, name) == getattr(viewer, name) for name in same)
        return self.pid if is_near else 0

    def is_reachable(self) -> bool:
        """Tell whether this process can connect to the rank's listener.

        If so, the two have one kernel and one network namespace.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(_PROBE_SECONDS)
            try:
                probe.connect(f"\0{self.listener}")
            except (ConnectionError, PermissionError, TimeoutError):
                return False
            except BlockingIOError:  # other ranks fill the listener's queue
                pass
        return True


@dataclass
class Met:
    """What a rank keeps of a meeting, for the next one after a failed step."""

    place: str  # in the group's store
    hosts: list[Host]
    n_meetings: int = 0  # since then
    # This rank's keys in stores of meetings that are over.
    left: list[tuple[Any, str]] = field(default_factory=list)
    # Raises if a rank is gone: the failed world's.
    check: Callable[[], None] = lambda: None
    # Whether some ranks may have a newer world, which this one has not.
    is_behind: bool = False
    uses_group: bool = False  # the failed world's operations are the group's

    def watch(self, world: _native.RankWorld) -> None:
        """Check the ranks of a world that has failed."""
        self.uses_group = world.uses_group
        # A rank that has left this world may be in the newer one.
        self.check = (lambda: None) if self.is_behind else world.check_gone


def count_by_host(hosts: Sequence[Host]) -> list[int]:
    """Return how many ranks each host has; empty if links cannot join the hosts."""
    counts: list[int] = []
    firsts: list[Host] = []
    for host in hosts:
        if firsts and host.shares_memory_with(firsts[-1]):
            counts[-1] += 1
            continue
        if any(host.shares_memory_with(first) for first in firsts):
            return []  # a host's ranks are not contiguous
        counts.append(1)
        firsts.append(host)
    is_small = len(counts) <= _native.MAX_HOSTS
    if is_small and max(counts) <= _native.MAX_SHARED_MEMORY_RANKS and len(counts) > 1:
        return counts
    return []


def name_of_host(host: int, first: int, n_ranks: int) -> str:
    """Return the name of a host in messages: its ranks, and its number."""
    if n_ranks == 1:
        return f"rank {first} (host {host})"
    return f"ranks {first} to {first + n_ranks - 1} (host {host})"


class Peers:
    """The ranks of a group, and whether each still runs.

    Until the ranks have met they know each other only through the store.  Later they
    need it no more.  That matters: a store on a dead rank 0 does not answer, and its
    connection stays open as long as that rank's DataLoader workers live.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        size: int,
        seconds: float = torch_groups.DEFAULT_TIMEOUT_SECONDS,
        listener: str = "",
        met: Met | None = None,
    ) -> None:
        self.rank, self.size, self._seconds = rank, size, seconds
        self.here = replace(Host.here(), listener=listener)
        self._hosts = dict(enumerate(met.hosts if met is not None else []))
        self._hosts[rank] = self.here
        # The group's store, under a prefix of this meeting; None: torch hides it.
        self.store: Any = None
        self._store: Any = None  # the same, while it is needed to watch processes
        self._n_sent = 0
        self._n_looked = 0
        self._keys: set[str] = set()  # this rank's in the store
        self._is_store_lost = False
        self._met = met
        self.gone: BaseException | None = None  # from the failed world's check
        self.place = ""
        store = torch_groups.group_store(group)
        if store is None:
            return
        self._store_host = "the group's store, which rank 0 or the launcher hosts,"
        if torch_groups.is_store_of_rank_0(group):
            self._store_host = "rank 0, which hosts the group's store,"
        if met is None:
            name = torch_groups.group_name(group)
            number = next(_wrap_numbers[name])
            self.place = f"paceline/{name}/{_environment.start()}/{number}"
        else:
            self.place = f"{met.place}/{met.n_meetings + 1}"
        self.store = forks.note(dist.PrefixStore(self.place, store))  # type: ignore[attr-defined]
        self._store = self.store
        if met is None:
            self._in_time(self._tell_and_read_hosts)

    @property
    def hosts(self) -> list[Host]:
        """Where each rank runs, once all are known."""
        return [self._hosts[rank] for rank in range(self.size)]

    def meet(self, hosts: list[Host]) -> None:
        """Take over the hosts that the ranks have sent each other."""
        self._hosts = dict(enumerate(hosts))
        if self._met is not None:
            self._delete_left(self._met)
        elif all(host.visible_pid(self.here) for host in hosts):
            self._store = None  # every process can be watched from here

    def _delete_left(self, met: Met) -> None:
        """Delete keys of earlier meetings: every rank has left those."""
        left, met.left = met.left, []

        def delete() -> None:
            for store, key in left:
                store.delete_key(key)

        self._in_time(delete)

    def keep(self) -> Met:
        """Return what the next meeting of these ranks needs; this one is over."""
        if self._met is None:
            met = Met(self.place, self.hosts)
        else:
            met = self._met
            met.hosts, met.n_meetings = self.hosts, met.n_meetings + 1
        met.left += [(self.store, key) for key in self._keys]
        return met

    def part(self, ranks: Sequence[int]) -> None:
        """Count ranks that did not reach their host's first rank as of another host."""
        if self.rank == 0:
            _log.warning(
                "ranks %s do not reach a rank with the same boot id, and count as of "
                "another host: a cloned machine, or a sandbox without Unix sockets",
                ranks,
            )
        for rank in ranks:
            boot = f"{self._hosts[rank].boot}/clone"
            self._hosts[rank] = replace(self._hosts[rank], boot=boot)
        self.here = self._hosts[self.rank]

    def read(self, message: bytes, kind: Any, sender: int) -> Any:
        """Return the value in a rank's message.

        If it is damaged, all ranks raise ``PeerError``.
        """
        who = f"rank {self.rank}: rank {sender}"
        try:
            return _messages.unpack(message, kind, who)
        except _native.PeerError as error:
            self.tell_of_end(error)
            raise

    def _in_time(self, ask: Callable[[], _Answer]) -> _Answer:
        """Ask the store, with a deadline in case its process has stopped.

        A failure of the store is raised as the loss of its process.
        """
        answers: list[_Answer] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(ask())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory for a thread: ask without a deadline
            run()
        else:
            patience = Patience(self._seconds)
            while thread.is_alive() and patience.left() > 0:
                thread.join(min(self._seconds, CHECK_EVERY_SECONDS))
        who = f"rank {self.rank}: {self._store_host}"
        if answers:
            return answers[0]
        if errors and not isinstance(errors[0], dist.DistError):
            raise errors[0]
        self._is_store_lost = True
        if not errors:
            words = f"has not answered within {self._seconds:g} s"
            raise _native.PeerTimeoutError(f"{who} {words}")
        words = f"was lost during construction ({errors[0]})"
        raise _native.PeerError(f"{who} {words}") from errors[0]

    def _tell_and_read_hosts(self) -> None:
        self._store.set(f"host/{self.rank}", _messages.pack(self.here))
        self._read_hosts(self._store)

    def _read_hosts(self, store: Any) -> None:
        """Read the hosts of the next ranks in turn; of all ranks if they are few."""
        first = self.rank + self._n_looked
        for rank in (n % self.size for n in range(first, first + self.size)):
            if self._n_looked - (first - self.rank) > _READ_TOGETHER // self.size:
                return
            self._n_looked += 1
            if rank not in self._hosts and store.check([f"host/{rank}"]):
                found = store.get(f"host/{rank}")
                self._hosts[rank] = self.read(found, Host, sender=rank)

    def check(self) -> None:
        """Raise ``PeerError`` if a rank is known to be gone."""
        if self._met is not None:
            try:
                self._met.check()
            except _native.PeerError as error:
                self.gone = error
                raise
        self._check_processes()
        if self._store is None:
            return
        self._in_time(self._look_into_store)
        self._check_processes()

    def _look_into_store(self) -> None:
        if self._store.check(["gone"]):
            told, who = self._store.get("gone"), f"rank {self.rank}: a rank"
            self._fail(*_messages.unpack(told, tuple[int, str], who))
        self._read_hosts(self._store)

    def tell_of_end(self, why: BaseException) -> None:
        """Make the others' :meth:`check` raise that this rank has left the meeting.

        If it has left because another is gone, tell that.
        """
        if self.store is None or self._is_store_lost:
            return
        rank, what = self.rank, f"left the construction ({words_of(why)})"
        culprit = getattr(why, "rank", None)
        if isinstance(why, _native.PeerError) and culprit is not None:
            known = f"rank {self.rank}: rank {culprit} "
            if str(why).startswith(known):
                rank, what = culprit, str(why).removeprefix(known)
        with suppress(_native.PeerError):
            if self._in_time(lambda: self.store.check(["gone"])):
                return  # the first to leave is told of
        self._tell_gone(rank, what)

    def _tell_gone(self, rank: int, what: str) -> None:
        with suppress(_native.PeerError):
            self._keys.add("gone")
            self._in_time(lambda: self.store.set("gone", _messages.pack((rank, what))))

    def _check_processes(self) -> None:
        for rank, host in self._hosts.items():
            if rank == self.rank:
                continue
            pid = host.visible_pid(self.here)
            if pid and _native.has_ended(pid):
                if self._store is not None and rank != 0:
                    self._tell_gone(rank, "died during construction")
                self._fail(rank, f"(process {pid}) died during construction")

    def all_gather(self, message: bytes, seconds: float) -> list[bytes]:
        """Send `message` to all ranks through the store; return every rank's, by rank.

        If a rank dies, or has sent nothing after `seconds`, this raises ``PeerError``.
        """
        try:
            return self._all_gather(message, seconds)
        except _native.PeerError as error:
            if isinstance(error.__cause__, dist.DistError):
                self._find_ended()  # the store's rank is ending: wait for that
            raise

    def _find_ended(self) -> None:
        self._store = None
        self._check_for(_LAST_CHECK_SECONDS)

    def _check_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.check()
            time.sleep(10 * POLL_SECONDS)

    def _all_gather(self, message: bytes, seconds: float) -> list[bytes]:
        """Let rank 0 read all messages and send them on as one.

        Otherwise each rank would request every other's from the one store.
        """
        store, number = self.store, self._n_sent
        self._n_sent += 1
        key, together = f"message/{number}/{self.rank}", f"messages/{number}"
        others = [f"message/{number}/{rank}" for rank in range(1, self.size)]

        def pass_on() -> list[bytes]:
            if self.rank != 0:
                who = f"rank {self.rank}: rank 0"
                received = _messages.split(store.get(together), self.size, who)
            else:
                received = [message, *(store.get(other) for other in others)]
                self._keys.add(together)
                store.set(together, _messages.join(received))
                if number > 0:  # all ranks sent these, so they have read those before
                    store.delete_key(f"messages/{number - 1}")
                    self._keys.discard(f"messages/{number - 1}")
            store.delete_key(key)  # rank 0 has read it
            self._keys.discard(key)
            return received

        self._keys.add(key)
        self._in_time(lambda: store.set(key, message))
        self._await_keys([together] if self.rank else others, number, seconds)
        return self._in_time(pass_on)

    def _count_first(self, keys: list[str]) -> int:
        there = itertools.takewhile(lambda key: self.store.check([key]), keys)
        return len(list(there))

    def _await_keys(self, keys: list[str], number: int, seconds: float) -> None:
        """Wait until the store has all keys; watch the ranks meanwhile."""
        patience = Patience(seconds)
        pause = POLL_SECONDS
        n_there = 0
        gone: _native.PeerError | None = None
        while True:
            n_there += self._in_time(lambda: self._count_first(keys[n_there:]))  # noqa: B023
            if n_there == len(keys):
                return
            if gone is not None:
                raise gone  # and not because it needs this rank no more
            try:
                self.check()
            except _native.PeerError as error:
                gone = error
                continue
            if patience.left() < 0:
                self._fail_late(number, seconds)
            time.sleep(pause)
            # One store serves all ranks, including the one awaited.
            pause = min(2 * pause, CHECK_EVERY_SECONDS)

    def _fail_late(self, number: int, seconds: float) -> None:
        keys = [f"message/{number}/{rank}" for rank in range(self.size)]
        are_there = self._in_time(lambda: [self.store.check([key]) for key in keys])
        silent = [rank for rank, there in enumerate(are_there) if not there] or [0]
        raise _native.PeerTimeoutError(
            f"rank {self.rank}: ranks {silent} have not come to this "
            f"construction within {seconds:g} s, the process group's timeout"
        )

    def blame(self, cause: BaseException) -> None:
        """Raise ``PeerError`` for a failed collective, naming the rank if possible."""
        self._check_for(_BLAME_SECONDS)
        silent = [rank for rank in range(self.size) if rank not in self._hosts]
        is_late = isinstance(cause, RuntimeError) and torch_groups.is_timeout(cause)
        if is_late and self.size == 2:
            silent = [1 - self.rank]
        whom = f"rank {silent[0]}" if len(silent) == 1 else f"one of ranks {silent}"
        if len(silent) > _MOST_NAMED:
            whom = f"one of {len(silent)} ranks"
        if not silent:
            whom = "a rank"
        kind = _native.PeerTimeoutError if is_late else _native.PeerError
        what = "kept this rank waiting" if is_late else "was lost"
        raise kind(
            f"rank {self.rank}: {whom} {what} during construction ({cause})"
        ) from cause

    def _fail(self, rank: int, what: str) -> None:
        raise _native.PeerError(f"rank {self.rank}: rank {rank} {what}")
