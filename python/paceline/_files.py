"""Files that appear under their name once they are complete, or not at all.

A writer locks a temporary file beside the target, writes it, and renames it.  A writer
that was killed holds no lock any more: the next one for the same target removes its
temporary file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


class _Sink(io.RawIOBase):
    """Writes to a descriptor and keeps the first error, which torch would hide."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.error: BaseException | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        n_bytes = len(rest)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException as error:  # an interrupt too
            self.error = self.error or error
            raise
        return n_bytes


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file whole or not at all; `write` gets a binary file to write to.

    If `path` is a link, write its target.  An existing file keeps its mode.  Write to a
    pipe, ``/dev/null`` and the like directly.  Raise OSError if writing fails, even if
    `write` raises another error because of it.
    """
    target = Path(os.path.realpath(path))
    before = None
    with suppress(FileNotFoundError):
        before = os.stat(target)
    if before is not None and not stat.S_ISREG(before.st_mode):
        with open(target, "wb") as file:
            _write(file.fileno(), write)
        return
    if before is not None:
        os.close(os.open(target, os.O_WRONLY))  # raises if it is read-only
    _remove_left_over(target)
    with _temporary(target) as (name, descriptor):
        if before is not None:
            with suppress(PermissionError):
                os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
        _write(descriptor, write)
        os.fsync(descriptor)
        os.replace(name, target)
    with suppress(OSError):  # not every file system supports it
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # else a crash may bring the old file back
        finally:
            os.close(folder)


def _write(descriptor: int, write: Callable[[BinaryIO], object]) -> None:
    sink = _Sink(descriptor)
    try:
        with io.BufferedWriter(sink) as file:
            write(file)
    except Exception as error:
        if sink.error is not None and error is not sink.error:
            raise sink.error from error
        raise
    if sink.error is not None:
        raise sink.error


def _prefix_of(target: Path) -> str:
    """Return the prefix of the names of temporary files for this target.

    It is a hash, since with the target's own name it could exceed the longest name.
    """
    return f".{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}."


def _is_locked(descriptor: int) -> bool:
    """Lock a file until it is closed; False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EINTR)  # no lock support
    return True


@contextmanager
def _temporary(target: Path) -> Iterator[tuple[Path, int]]:
    while True:
        name = target.parent / f"{_prefix_of(target)}{secrets.token_hex(8)}.part"
        # The kernel applies the umask.
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if _is_locked(descriptor) and os.fstat(descriptor).st_nlink > 0:
            break
        os.close(descriptor)  # another writer removed it as left over
    try:
        yield name, descriptor
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    finally:
        os.close(descriptor)


def _remove_left_over(target: Path) -> None:
    """Remove the temporary files of killed writers for this target."""
    prefix = _prefix_of(target)
    for name in os.listdir(target.parent):
        if not (name.startswith(prefix) and name.endswith(".part")):
            continue
        with suppress(OSError):
            descriptor = os.open(target.parent / name, os.O_WRONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(target.parent / name)
            finally:
                os.close(descriptor)
