"""Recordings: files in memory with the last steps of ranks and DataParallel models.

``csrc/ipc/recorder.c`` makes a file for each wrapper: a memfd, which has no name and
ends with its process.  ``paceline top`` and ``paceline trace`` find it among the
descriptors of this user's processes, in /proc.  Its size is sealed: cutting it would
kill its writer and readers.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import mmap
import os
import re
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
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
_STEP = struct.Struct("<Q12q24x")
_BUCKET = struct.Struct("<4q")
_MOST_TEXT = 200  # of each entry of `who`
_WHO = {
    **dict.fromkeys(("kind", "job", "model", "host", "device"), str),
    **dict.fromkeys(("rank", "world_size", "local_rank", "pid", "start"), int),
    "wall_minus_monotonic_ns": int,
}
"""The entries that readers need, and their types."""

# ---- finding ------------------------------------------------------------------------


_F_GET_SEALS = 1034  # fcntl lacks it in some builds of Python
_SEALS = 7  # PLI_RECORDER_SEALS of csrc/ipc/recorder.h


class Process(NamedTuple):
    """A process identity that survives the reuse of its PID."""

    pid: int  # in its own PID namespace
    start: int  # in clock ticks

    @classmethod
    def of(cls, pid: int | str) -> Process:
        """Return the identity of a process; raise OSError if it is gone."""
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        status = Path(f"/proc/{pid}/status").read_bytes()
        pids = re.search(rb"^NSpid:.*?(\d+)$", status, re.MULTILINE)
        return cls(int(pids[1] if pids else pid), int(fields[19]))


def find(name: str) -> Iterator[tuple[int, Path]]:
    """Yield the process, as seen from here, and the path of each file of this name.

    Leave out processes of other users, and those that may not be looked into.
    """
    link, user = f"/memfd:{name} (deleted)", os.geteuid()
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        folder = f"/proc/{pid}/fd"
        with suppress(OSError):  # it has ended, or may not be looked into
            if os.stat(folder).st_uid != user:
                continue
            files: dict[int, Path] = {}
            for fd in sorted(map(int, os.listdir(folder))):
                path = f"{folder}/{fd}"
                with suppress(FileNotFoundError):  # just closed
                    if os.readlink(path) == link:
                        files.setdefault(os.stat(path).st_ino, Path(path))
            yield from ((pid, path) for path in files.values())


# ---- writing ------------------------------------------------------------------------


def identity() -> str:
    """Return a job's name, if rank 0 calls this: its host and process number."""
    return f"{socket.gethostname()}:{os.getpid()}"


def start(**who: Any) -> _native.Recorder | None:
    """Return a new recorder; None if steps are not or cannot be recorded.

    `who` has the facts for readers: the entries of `_WHO` that are not added here.
    """
    name = _environment.recorder_name()
    if name is None:
        return None
    try:
        from paceline import _native

        who |= {
            **Process.of("self")._asdict(),
            "host": socket.gethostname(),
            "started": time.time(),
            "wall_minus_monotonic_ns": time.time_ns() - time.monotonic_ns(),
        }
        cut = {k: v[:_MOST_TEXT] if isinstance(v, str) else v for k, v in who.items()}
        return _native.Recorder(name, json.dumps(cut))
    except Exception as error:  # training must continue without a recorder
        _log.debug("steps are not recorded: %s", error)
        return None


class Steps:
    """Records the steps of a ``DataParallel``, if recording is on.

    As a context, it records the forward that runs inside it.  The file ends with
    `owner`, the model.
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


class Bucket(NamedTuple):
    """A bucket of a step.  Times are in nanoseconds; 0 if not known."""

    ready: int
    begin: int
    end: int
    n_bytes: int


class Step(NamedTuple):
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


def _parse(record: bytes) -> Step | None:
    """Return the finished step of a record, if it has one."""
    sequence, *fields = _STEP.unpack_from(record)
    if sequence == 0 or sequence % 2:
        return None
    rows = _BUCKET.iter_unpack(record[_STEP.size :])
    kept = itertools.islice(rows, max(fields[10], 0))
    whole: list[Any] = [*fields, tuple(Bucket(*row) for row in kept)]
    return Step(*whole)


def own_step(recorder: _native.Recorder | None, number: int) -> Step:
    """Return a finished step of this process; with zeros if it is not recorded."""
    record = recorder.read(number) if recorder is not None else b""
    step = _parse(record) if record else None
    unknown: list[Any] = [number, *[0] * 11, ()]
    return step if step is not None and step.number == number else Step(*unknown)


class Now(NamedTuple):
    """A process's activity, its begin, the step, and the rank it is waiting for."""

    activity: str
    since: int
    step: int
    awaiting: int


def printable(text: str) -> str:
    """Return a text in which escapes stand for what could drive a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _read_who(text: bytes, path: Path) -> dict[str, Any]:
    """Return the facts of a process, fit to be shown; raise RecordingError without."""
    try:
        who = json.loads(text.rstrip(b"\0"))
        is_whole = all(isinstance(who[name], kind) for name, kind in _WHO.items())
    except (ValueError, TypeError, KeyError, RecursionError):
        is_whole = False
    if not is_whole:
        raise RecordingError(f"{path} does not name the process that wrote it.")
    return {k: printable(v) if isinstance(v, str) else v for k, v in who.items()}


class Recording:
    """One process's steps, read from memory that the process still writes to.

    `who` has the facts that the process gave to `start`.  Raise ``RecordingError`` if
    the file is no recording, or belongs to another version; ``OSError`` if it is
    another user's, is not yet complete, or was just closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            is_sealed = fcntl.fcntl(descriptor, _F_GET_SEALS) & _SEALS == _SEALS
            if status.st_uid != os.geteuid() or not is_sealed:
                raise PermissionError(f"{path} is another user's, or not yet complete.")
            if status.st_size < _WHO_AT:
                raise RecordingError(f"{path} is too short for recorded steps.")
            self._memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        magic, version, header, record, n, n_buckets = _LAYOUT.unpack_from(self._memory)
        if magic != MAGIC:
            raise RecordingError(f"{path} holds no steps.")
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
        # Two equal reads: the writer was idle, in whatever order its stores appear.
        return _parse(before) if before == again else None

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()


def open_all(name: str) -> Iterator[Recording | RecordingError]:
    """Yield the recordings of this user's processes; an error for each unreadable one.

    The caller closes the recordings.  In their facts, a process has the number by which
    it is seen from here.
    """
    for pid, path in find(name):
        try:
            recording = Recording(path)
            process = Process.of(pid)
        except RecordingError as error:
            yield error.with_traceback(None)  # it would keep the file open
        except (OSError, ValueError):
            continue  # closed in the meantime, or not yet complete
        else:
            # Others may have inherited the descriptor, and outlive the writer.
            if process == (recording.who["pid"], recording.who["start"]):
                recording.who["pid"] = pid
                yield recording
            else:
                recording.close()
