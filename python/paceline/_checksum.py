"""A checksum at the end of files of `torch.save`, in the comment of the zip archive.

The checksum covers all bytes before it and finds any flipped bit.  torch ignores it.
"""

from __future__ import annotations

import os
import zlib
from typing import Any, BinaryIO

_END = b"PK\x05\x06"  # begins the last record, which ends with the comment's size
_END_BYTES = 22
_COMMENT = "paceline crc32 {:08x}"
_COMMENT_BYTES = len(_COMMENT.format(0))
_LONGEST_END_BYTES = _END_BYTES + (1 << 16)
_CHUNK_BYTES = 1 << 22


class ChecksumWriter:
    """A file for `torch.save`, which writes the last record in a single call."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._crc, self._held = file, 0, b""

    def write(self, data: Any) -> int:
        """Write bytes, but hold back those that may be the last record."""
        self._emit(self._held)
        self._held = bytes(data) if len(data) == _END_BYTES else b""
        if not self._held:
            self._emit(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is closed."""

    def finish(self) -> None:
        """Write held bytes; add the checksum if the archive has no comment yet."""
        if not (self._held.startswith(_END) and self._held.endswith(b"\0\0")):
            self._emit(self._held)
            return
        self._emit(self._held[:-2] + _COMMENT_BYTES.to_bytes(2, "little"))
        self._file.write(_COMMENT.format(self._crc).encode())

    def _emit(self, data: Any) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)


def damage_of(path: str | os.PathLike[str]) -> str | None:
    """Describe the damage of a file; None if none is found, or it is an old pickle."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(2)
        rest = size - _COMMENT_BYTES
        file.seek(max(rest - _END_BYTES, 0))
        if file.read(len(_END)) == _END and rest >= _END_BYTES:
            crc = 0
            file.seek(0)
            while rest and (chunk := file.read(min(_CHUNK_BYTES, rest))):
                crc, rest = zlib.crc32(chunk, crc), rest - len(chunk)
            is_whole = file.read() == _COMMENT.format(crc).encode()
            return None if is_whole else "its content does not match its checksum"
        file.seek(max(size - _LONGEST_END_BYTES, 0))
        tail = file.read()
    if head == b"PK":
        end = tail[max(tail.rfind(_END), 0) :]
        n_more = int.from_bytes(end[_END_BYTES - 2 : _END_BYTES], "little")
        is_whole = end.startswith(_END) and len(end) >= _END_BYTES + n_more
        return None if is_whole else f"it ends early, after {size} bytes"
    if head.startswith(b"\x80"):  # a pickle, as torch before 1.6 wrote it
        return None
    return f"its {size} bytes do not begin like a file of torch.save"
