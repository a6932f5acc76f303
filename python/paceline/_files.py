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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_FILE = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_LOOKS = 50  # at a file that others replace at the same time


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

    If `path` is a link, write its target, if the kernel lets this user follow the link.
    An existing file keeps its permissions.  Write to a pipe that has a reader,
    ``/dev/null`` and the like directly.  Raise OSError if writing fails, even if
    `write` raises another error because of it.
    """
    with ExitStack() as stack:

        def opened(name: str | Path, flags: int) -> int:
            descriptor = os.open(name, flags, 0o666)
            stack.callback(os.close, descriptor)
            return descriptor

        for _ in range(_MOST_LOOKS):
            before = None
            folder, name = opened(path.parent, _FOLDER), path.name
            if not os.path.lexists(path):
                break
            # The kernel follows links, and creates the missing target of one.
            is_created = not os.path.exists(path)
            file = opened(path, _FILE | os.O_CREAT)
            before = os.fstat(file)
            if not stat.S_ISREG(before.st_mode):
                os.set_blocking(file, True)
                _write(file, write)
                return
            parent, name = os.path.split(os.readlink(f"/proc/self/fd/{file}"))
            with suppress(FileNotFoundError):
                folder = opened(parent, _FOLDER)
                if os.path.samestat(before, os.lstat(name, dir_fd=folder)):
                    break
            # Another process has replaced the file in between: look again.
        else:
            why = "the file has no name any more, or does not keep it"
            raise FileNotFoundError(errno.ENOENT, why, str(path))
        if before is not None and is_created and before.st_size == 0:
            before = None
            with suppress(FileNotFoundError):  # another writer removed it
                os.unlink(name, dir_fd=folder)
        with _temporary(folder, name, 0o600 if before else 0o666) as (part, descriptor):
            _remove_left_over(folder, name, os.fstat(descriptor).st_uid)
            _write(descriptor, write)
            if before is not None:
                with suppress(OSError):  # not permitted, or no such user in a container
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode) & 0o777)
            os.fsync(descriptor)
            os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        with suppress(OSError):  # not every file system supports it
            os.fsync(folder)  # else a crash may bring the old file back


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


def _prefix_of(name: str) -> str:
    """Return the prefix of the names of temporary files for this target.

    It is a hash, since with the target's own name it could exceed the longest name.
    """
    return f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}."


def _is_locked(descriptor: int) -> bool:
    """Lock a file until it is closed; False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EINTR)  # no lock support
    return True


@contextmanager
def _temporary(folder: int, target: str, mode: int) -> Iterator[tuple[str, int]]:
    while True:
        name = f"{_prefix_of(target)}{secrets.token_hex(8)}.part"
        flags = _FILE | os.O_CREAT | os.O_EXCL
        descriptor = os.open(name, flags, mode, dir_fd=folder)  # applies the umask
        if _is_locked(descriptor) and os.fstat(descriptor).st_nlink > 0:
            break
        os.close(descriptor)  # another writer removed it as left over
    try:
        yield name, descriptor
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)


def _remove_left_over(folder: int, target: str, user: int) -> None:
    """Remove the temporary files of this user's killed writers for this target.

    Anyone who may write to the folder can put other things there under such names.
    """
    prefix = _prefix_of(target)
    for name in os.listdir(folder):
        if not (name.startswith(prefix) and name.endswith(".part")):
            continue
        with suppress(OSError):
            descriptor = os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=folder)
            try:
                facts = os.fstat(descriptor)
                if stat.S_ISREG(facts.st_mode) and facts.st_uid == user:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=folder)
            finally:
                os.close(descriptor)
