"""Recordings: files that hold the last steps of ranks and of DataParallel models.

``csrc/ipc/recorder.c`` writes a file for each wrapper; ``paceline top`` and ``paceline
trace`` read them.  A file is named after its process::

    paceline-<user>-<PID namespace>-<process>-<its start, in clock ticks>-<n>

so that a reader can tell from the name whether the process still runs.  The wrapper
removes its file; find() removes the files of processes that were killed.
"""

from __future__ import annotations

import itertools
import json
import logging
import mmap
import os
import re
import socket
import stat
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline import _environment

if TYPE_CHECKING:
    from paceline import _native

_log = logging.getLogger("paceline")

MAGIC = b"PLRECORD"
VERSION = 1
NOBODY, SOMEBODY = -1, -2
"""Instead of a rank in `awaited`: there was no wait; a wait for an unknown rank."""

ACTIVITIES = (
    "construction",
    "user's code",
    "forward",
    "backward",
    "end of backward",
    "join",
)
IDLE, FORWARD, BACKWARD, FINISHING = 1, 2, 3, 4

_LAYOUT = struct.Struct("<8s5I")
_NOW = struct.Struct("<4q")
_NOW_AT, _WHO_AT = 64, 128
_SEQUENCE = struct.Struct("<Q")
_STEP = struct.Struct("<Q12q24x")
_BUCKET = struct.Struct("<4q")
_MOST_TEXT = 200  # of each entry of `who`
_WHO = {
    **dict.fromkeys(("kind", "job", "model", "host", "device"), str),
    **dict.fromkeys(("rank", "world_size", "local_rank", "pid"), int),
    "wall_minus_monotonic_ns": int,
}
"""The entries that readers need, and their types."""

# ---- finding ------------------------------------------------------------------------


class Process(NamedTuple):
    """A process identity that survives the reuse of its PID."""

    namespace: int
    pid: int
    start: int

    @classmethod
    def this(cls) -> Process:
        """Return this process."""
        pid = os.getpid()
        return cls(_pid_namespace(), pid, _start_of(pid) or 0)


_NAME = re.compile(r"paceline-(\d+)-(\d+)-(\d+)-(\d+)-(\d+)")


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_of(pid: int) -> int | None:
    """Return when a process began, in clock ticks; None if it is gone or dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def find(folder: Path) -> list[Path]:
    """Return the files of this user's running processes; remove those of ended ones.

    Leave alone the files of another PID namespace: this one cannot see its processes.
    """
    found = []
    namespace, user = _pid_namespace(), os.geteuid()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None or int(match[1]) != user or int(match[2]) != namespace:
                continue
            if _start_of(int(match[3])) == int(match[4]):
                found.append(folder / entry.name)
            else:
                with suppress(OSError):  # another process may have removed it
                    os.unlink(entry.path)
    return sorted(found, key=lambda path: [*map(int, path.name.split("-")[1:])])


# ---- writing ------------------------------------------------------------------------

_numbers = itertools.count()


def identity() -> str:
    """Return a job's name, if rank 0 calls this: its host and process number."""
    return f"{socket.gethostname()}:{os.getpid()}"


def start(**who: Any) -> _native.Recorder | None:
    """Return a new recorder; None if steps are not or cannot be recorded.

    Parameters
    ----------
    **who : str or int
        The facts for readers: ``kind``, ``job``, ``model``, ``rank``, ``world_size``,
        ``local_rank``, ``device``.
    """
    folder = _environment.recorder_folder()
    if folder is None:
        return None
    try:
        from paceline import _native

        find(folder)  # removes the files of ended processes
        process = Process.this()
        who |= {
            "pid": process.pid,
            "host": socket.gethostname(),
            "started": time.time(),
            "wall_minus_monotonic_ns": time.time_ns() - time.monotonic_ns(),
        }
        cut = {k: v[:_MOST_TEXT] if isinstance(v, str) else v for k, v in who.items()}
        name = "paceline-{}-{}-{}-{}-{}".format(os.geteuid(), *process, next(_numbers))
        return _native.Recorder(folder / name, json.dumps(cut))
    except Exception as error:  # training must continue without a recorder
        _log.debug("steps are not recorded: %s", error)
        return None


class Steps:
    """Records the steps of a ``DataParallel``, if recording is on.

    As a context, it records the forward that runs inside it.

    Parameters
    ----------
    owner : DataParallel
        The model whose steps are recorded.  Its file is removed with it.
    n_replicas : int
        The number of its replicas.
    """

    def __init__(self, owner: Any, n_replicas: int) -> None:
        self._n = 0
        self._recorder = start(
            kind="replicas",
            job=identity(),
            model=type(owner.module).__name__,
            rank=0,
            world_size=n_replicas,
            local_rank=0,
            device=str(owner.src_device_obj),
        )
        if self._recorder is not None:
            weakref.finalize(owner, self._recorder.close)

    def __enter__(self) -> Steps:
        self._n += 1
        self._record(FORWARD)
        return self

    def __exit__(self, *error: object) -> None:
        self._record(IDLE)

    def _record(self, activity: int) -> None:
        if self._recorder is not None:
            self._recorder.record(activity, self._n)


# ---- reading ------------------------------------------------------------------------


class RecordingError(Exception):
    """A file does not hold steps that can be read; the message is one sentence."""


@dataclass(frozen=True)
class Bucket:
    """A bucket of a step.  Times are in nanoseconds; 0 if not known."""

    ready: int
    begin: int
    end: int
    n_bytes: int


@dataclass(frozen=True)
class Step:
    """A finished step.  Times are nanoseconds of the host's clock; 0 if not known."""

    number: int
    forward_begin: int
    forward_end: int
    backward_begin: int
    backward_end: int
    reduced: int
    end: int
    reducing: int
    waiting: int
    awaited: int
    n_buckets: int
    n_bytes: int
    buckets: tuple[Bucket, ...]

    @property
    def begin(self) -> int:
        """The first time that is known."""
        return self.forward_begin or self.backward_begin


@dataclass(frozen=True)
class Now:
    """A process's activity, its begin, the step, and the rank it is waiting for."""

    activity: str
    since: int
    step: int
    awaiting: int


def _read_who(text: bytes, path: Path) -> dict[str, Any]:
    """Return the facts of a process; raise RecordingError if some are missing."""
    try:
        who = json.loads(text.rstrip(b"\0"))
        is_whole = all(isinstance(who[name], kind) for name, kind in _WHO.items())
    except (ValueError, TypeError, KeyError, RecursionError):
        is_whole = False
    if not is_whole:
        raise RecordingError(f"{path} does not name the process that wrote it.")
    return dict(who)


class Recording:
    """One process's steps, read from memory that the process still writes to.

    Parameters
    ----------
    path : path
        The file.

    Attributes
    ----------
    who : dict
        The facts that the process gave to `start`.

    Raises
    ------
    RecordingError
        If the file is no recording, or belongs to another user or version.
    OSError
        If the file cannot be opened, for example because it was just removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise RecordingError(f"{path} is not a file of this user.")
            if status.st_size < _WHO_AT:
                raise RecordingError(f"{path} is too short for recorded steps.")
            self._memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        magic, version, header, record, n, n_buckets = _LAYOUT.unpack_from(self._memory)
        if magic != MAGIC:
            raise RecordingError(f"{path} is not yet complete, or holds no steps.")
        if version != VERSION:
            raise RecordingError(
                f"{path} was written by a Paceline that records in layout {version}, "
                f"and this one reads layout {VERSION}: use that of the training."
            )
        self._kept_bytes = _STEP.size + n_buckets * _BUCKET.size
        if (
            header < _WHO_AT
            or record < self._kept_bytes
            or status.st_size < header + n * record
        ):
            raise RecordingError(f"{path} is cut off, or was overwritten.")
        self._header, self._record, self._n = header, record, n
        self.who = _read_who(self._memory[_WHO_AT:header], path)

    @property
    def now(self) -> Now:
        """The process's current activity."""
        activity, since, step, awaiting = _NOW.unpack_from(self._memory, _NOW_AT)
        is_known = 0 <= activity < len(ACTIVITIES)
        words = ACTIVITIES[activity] if is_known else "an unknown activity"
        return Now(words, since, step, awaiting)

    def steps(self) -> list[Step]:
        """Return the finished steps that are still in the file, in order."""
        found = filter(None, map(self._step, range(self._n)))
        return sorted(found, key=lambda step: step.number)

    def _step(self, index: int) -> Step | None:
        at = self._header + index * self._record
        before = self._memory[at : at + self._kept_bytes]
        again = self._memory[at : at + self._kept_bytes]
        (sequence,) = _SEQUENCE.unpack_from(before)
        # Two equal reads: the writer was idle, in whatever order its stores appear.
        if sequence == 0 or sequence % 2 or before != again:
            return None
        _, *fields = _STEP.unpack_from(before)
        n_kept = max(fields[10], 0)
        rows = itertools.islice(_BUCKET.iter_unpack(before[_STEP.size :]), n_kept)
        whole: list[Any] = [*fields, tuple(Bucket(*row) for row in rows)]
        return Step(*whole)

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()


def open_all(folder: Path) -> Iterator[Recording | RecordingError]:
    """Yield the recordings of this user's processes; an error for each unreadable one.

    The caller closes the recordings.
    """
    for path in find(folder):
        try:
            yield Recording(path)
        except RecordingError as error:
            yield error
        except (OSError, ValueError):
            continue  # removed in the meantime, or still empty
