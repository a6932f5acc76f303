"""A checksum at the end of files of `torch.save`, in the comment of the zip archive.

The checksum covers all bytes before it and finds any flipped bit.  torch ignores it.
Nothing may follow it: torch writes no comment, so any other end of a file is damage.
A mark in the archive's ``data.pkl`` outlives a tool that writes the archive anew.
"""

from __future__ import annotations

import os
import pickle  # lint: pickle - the format of torch.save, which this writes
import zipfile
import zlib
from contextlib import suppress
from typing import Any, BinaryIO

import torch

_END = b"PK\x05\x06"  # begins the last record, which ends with the comment's size
_END_BYTES = 22
_COMMENT = "paceline crc32 {:08x}"
_COMMENT_BYTES = len(_COMMENT.format(0))
_CHUNK_BYTES = 1 << 22
_MARK = "paceline"


class _Marking:
    """Pickle for `torch.save`: a mark, a second pickle, follows that of the state."""

    class Pickler(pickle.Pickler):
        def dump(self, obj: Any) -> None:
            super().dump(obj)
            self.clear_memo()
            super().dump(_MARK)


class _Summed:
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
        """Write the last record and the checksum."""
        if not (self._held.startswith(_END) and self._held.endswith(b"\0\0")):
            raise RuntimeError("this version of torch ends a file in an unknown way")
        self._emit(self._held[:-2] + _COMMENT_BYTES.to_bytes(2, "little"))
        self._file.write(_COMMENT.format(self._crc).encode())

    def _emit(self, data: Any) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)


def save_summed(state: Any, file: BinaryIO) -> None:
    """Write a file of `torch.save` that has the mark and ends with the checksum."""
    summed: Any = _Summed(file)
    torch.save(state, summed, pickle_module=_Marking)
    summed.finish()


def damage_of(path: str | os.PathLike[str]) -> str | None:
    """Describe damage: None if the checksum shows none, "" if there is no checksum."""
    # Without O_NONBLOCK a pipe would wait for a writer.
    with open(path, "rb", opener=lambda p, f: os.open(p, f | os.O_NONBLOCK)) as file:
        head = file.read(2)
        if head[:1] == b"\x80" and head[1:] <= b"\x05":
            return ""  # a pickle of protocol 5 or less, as torch before 1.6 wrote it
        size = file.seek(0, os.SEEK_END)
        rest = max(size - _COMMENT_BYTES, 0)
        file.seek(max(rest - _END_BYTES, 0))
        tail = file.read()
        if tail.startswith(_END) and rest >= _END_BYTES:
            crc = 0
            file.seek(0)
            while rest and (chunk := file.read(min(_CHUNK_BYTES, rest))):
                crc, rest = zlib.crc32(chunk, crc), rest - len(chunk)
            is_whole = file.read() == _COMMENT.format(crc).encode()
            return None if is_whole else "its content does not match its checksum"
        if head != b"PK":
            return f"its {size} bytes do not begin like a file of torch.save"
        end = tail[-_END_BYTES:]
        if not (end.startswith(_END) and end.endswith(b"\0\0")):
            return f"it was cut or continued, and has {size} bytes"
        with suppress(Exception), zipfile.ZipFile(file) as archive:  # torch raises
            (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            if archive.read(name).endswith(pickle.dumps(_MARK, 2)):
                return "another program has removed its checksum"
    return ""
