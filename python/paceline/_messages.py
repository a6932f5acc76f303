"""Messages between ranks: plain typed data in a fixed envelope, never a pickle.

::

    "paceline" | format, 2 bytes | bytes of JSON, 8 bytes | JSON

A message is None, a bool, int, float, str, bytes, a tensor of bytes, an enum, or a
list, tuple, dict or dataclass of these.  The receiver gives the type that it expects.
Everything else is one error, a ``PeerError`` that names the sender, since any process
that reaches the store or the ports of a process group can send any bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import struct
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline._compat import torch_groups
from paceline._errors import MismatchError, PeerError, PeerTimeoutError

FORMAT = 1
"""Raise it with each change of what ranks send."""
MAX_BYTES = 64 << 20
"""The longest message is the description of a model that differs between ranks: some
200 bytes a parameter, 20 MB for a hundred thousand of them."""
_MAX_TEXT = 1 << 16  # of an exception
_HEAD = struct.Struct("!8sHQ")
_MAGIC = b"paceline"
_FORGED = (
    "{} has sent a damaged or forged message, or that of another call ({}): check that "
    "every rank makes the same calls, in the same order, and which processes reach the "
    "store and the ports of this job"
)
_EXCEPTIONS = {
    kind.__name__: kind
    for kind in (
        *(RuntimeError, NotImplementedError, TypeError, ValueError, OSError),
        *(MemoryError, MismatchError, PeerError, PeerTimeoutError),
    )
}


def pack(value: Any) -> bytes:
    """Return a message."""
    text = json.dumps(value, default=_plain, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_BYTES:
        raise ValueError(f"a message of {len(text)} bytes is too long for other ranks")
    return _HEAD.pack(_MAGIC, FORMAT, len(text)) + text


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.numpy().tobytes()
    if isinstance(value, bytes):
        return {"": base64.b64encode(value).decode("ascii")}
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    raise TypeError(f"ranks send no {type(value).__name__}")


def unpack(message: bytes, kind: Any, sender: str) -> Any:
    """Return the value in a message; raise ``PeerError`` unless it is of a kind.

    `kind` is ``Any``, a plain type, enum or dataclass, or ``X | None``, ``list[X]``,
    ``tuple[X, ...]``, ``tuple[X, Y]`` or ``dict[str, X]`` of these.  `sender` is for
    errors, as in "rank 0: rank 1".
    """
    with _sent_by(sender):
        return _read(kind, _parse(message, sender))


@contextmanager
def _sent_by(sender: str) -> Iterator[None]:
    """Raise ``PeerError`` if a message cannot be read."""
    try:
        yield
    except (ValueError, TypeError, struct.error, RecursionError) as error:
        raise PeerError(_FORGED.format(sender, str(error)[:200])) from None


def _parse(message: bytes, sender: str) -> Any:
    """Return what the JSON of a message holds."""
    magic, version, n_bytes = _HEAD.unpack_from(message)
    if magic == _MAGIC and version != FORMAT:
        raise PeerError(
            f"{sender} runs another version of paceline: install the same version "
            "for every rank"
        )
    n_given = len(message) - _HEAD.size
    if magic != _MAGIC or n_bytes != n_given or n_given > MAX_BYTES:
        raise ValueError(f"{n_given} bytes after the head {message[: _HEAD.size]!r}")
    text = str(memoryview(message)[_HEAD.size :], "ascii")
    return json.loads(text, object_hook=_restore)


def _restore(found: dict[str, Any]) -> Any:
    is_bytes = found.keys() == {""}
    return base64.b64decode(found[""], validate=True) if is_bytes else found


def _check(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise ValueError(f"{kind.__name__} expected, not {type(value).__name__}")


@functools.cache
def _parts_of(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what is made of a value's parts, and the kinds of the parts."""
    if not dataclasses.is_dataclass(kind):
        return typing.get_origin(kind), typing.get_args(kind)
    hints = typing.get_type_hints(kind)
    return kind, tuple(hints[field.name] for field in dataclasses.fields(kind))


def _read(kind: Any, value: Any) -> Any:
    """Return a parsed value as an instance of `kind`, or raise an error."""
    if kind in (str, int, bool, float, bytes):
        _check(value, kind)
        return value
    if kind is Any:
        if not isinstance(value, list | dict):
            return value
        kind = list[Any] if isinstance(value, list) else dict[str, Any]
    if isinstance(kind, enum.EnumMeta):
        return kind(value)
    if kind is torch.Tensor:
        _check(value, bytes)
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    of, inner = _parts_of(kind)
    if of in (typing.Union, types.UnionType):  # of one kind and None, in this order
        return None if value is None else _read(inner[0], value)
    if of is dict:
        _check(value, dict)
        return {key: _read(inner[1], each) for key, each in value.items()}
    _check(value, list)
    if of is list or inner[1:] == (...,):
        inner = inner[:1] * len(value)
    if len(value) != len(inner):
        raise ValueError(f"{len(inner)} values expected, not {len(value)}")
    parts = [_read(*pair) for pair in zip(inner, value, strict=True)]
    return of(parts) if of in (list, tuple) else of(*parts)


@dataclass(frozen=True)
class Failure:
    """An exception, as other ranks learn of it: its type, or the nearest base."""

    kind: str
    text: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception."""
        lines = "".join(traceback.format_exception(error))
        bases = [base.__name__ for base in type(error).__mro__]
        kind = next((name for name in bases if name in _EXCEPTIONS), "RuntimeError")
        text = str(error) if kind == bases[0] else f"{bases[0]}: {error}"
        return cls(kind, text[:_MAX_TEXT], lines[-_MAX_TEXT:])

    def exception(self, rank: int) -> Exception:
        """Return what the other ranks raise; `rank` had the exception."""
        error = _EXCEPTIONS.get(self.kind, RuntimeError)(f"rank {rank}: {self.text}")
        notes: Any = error  # Python prints them from 3.11 on
        notes.__notes__ = [f"\nThe traceback of rank {rank}:\n{self.traceback}"]
        return error


# ---- several messages ---------------------------------------------------------------


def join(messages: Sequence[bytes]) -> bytes:
    """Return several messages as one: their lengths, 8 bytes each, then all bytes."""
    lengths = struct.pack(f"!{len(messages)}Q", *map(len, messages))
    return lengths + b"".join(messages)


def split(together: bytes, n: int, sender: str) -> list[bytes]:
    """Return the `n` messages of :func:`join`."""
    at, messages = 8 * n, []
    if at <= len(together):
        for n_bytes in struct.unpack_from(f"!{n}Q", together):
            messages.append(together[at : at + n_bytes])
            at += n_bytes
    if at != len(together):
        raise PeerError(_FORGED.format(sender, "the lengths are wrong"))
    return messages


def all_gather(
    message: bytes,
    gather: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    sender: str,
) -> list[bytes]:
    """Return every rank's message; `gather` is an all-gather of equal tensors."""
    # The user may have set another default device, to build models on it.
    mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    sizes = [int(size) for size in gather(torch.tensor([len(mine)], device="cpu"))]
    for rank, size in enumerate(sizes):
        if not _HEAD.size < size <= _HEAD.size + MAX_BYTES:
            words = f"{size} bytes, and none has more than {MAX_BYTES}"
            raise PeerError(_FORGED.format(f"{sender} {rank}", words))
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(mine)] = mine
    rows = zip(gather(padded), sizes, strict=True)
    return [row[:size].cpu().numpy().tobytes() for row, size in rows]


@contextmanager
def awaited(call: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Name the call for which ranks wait, if a rank is late or gone."""
    try:
        yield
    except RuntimeError as error:
        if not torch_groups.is_lost_peer(error):
            raise
        kind = PeerTimeoutError if torch_groups.is_timeout(error) else PeerError
        rank, size = torch_groups.rank_and_size(group)
        other = f"rank {1 - rank}" if size == 2 else "another rank"
        words = f"{call} waits for {other}: call it on every rank, equally often"
        raise kind(f"rank {rank}: {words} ({error})") from error


def all_gather_by(group: dist.ProcessGroup, message: bytes) -> list[bytes]:
    """Return every rank's message; the collectives of `group` carry them."""
    is_on_gpu = torch_groups.is_device_bound(group)

    def gather(mine: torch.Tensor) -> list[torch.Tensor]:
        mine = mine.cuda() if is_on_gpu else mine
        rows = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(rows, mine, group=group)
        return rows

    return all_gather(message, gather, f"rank {torch_groups.group_rank(group)}: rank")


@dataclass
class Turn:
    """Whether this process is in the body of ``with world.first()``, before others."""

    goes_first: bool = False

    def refuse(self, call: str) -> None:
        """Raise if the other ranks cannot make a call, since they wait for this one."""
        if self.goes_first:
            raise RuntimeError(
                f"{call} in the body of `with world.first():` waits for ranks that "
                "wait for this one to leave the body: call it after the body"
            )


turn = Turn()


def exchange(
    call: str, message: bytes, kind: Any, group: dist.ProcessGroup | None = None
) -> Iterator[Any]:
    """Return the values of all ranks of a group that make the same call.

    `message` is ``pack((call, value))``.  A value is read when the iterator comes to
    it.  Raise ``MismatchError`` if ranks make different calls.
    """
    turn.refuse(call)
    torch_groups.wait_for_gloo_at_exit()
    group = group or torch_groups.default_group()
    with awaited(call, group):
        rows = all_gather_by(group, message)
    own, parsed = torch_groups.group_rank(group), []
    for rank, row in enumerate(rows):
        with _sent_by(f"rank {own}: rank {rank}"):
            theirs, value = _parse(row, f"rank {own}: rank {rank}")
            parsed.append((_read(str, theirs), value))
    first = parsed[0][0]
    for rank, (theirs, _) in enumerate(parsed):
        if theirs != first:
            raise MismatchError(
                f"rank 0 has called {first} where rank {rank} has called {theirs}: "
                "every rank must make the same calls, in the same order"
            )
    return _values(parsed, kind, own)


def _values(parsed: list[tuple[str, Any]], kind: Any, own: int) -> Iterator[Any]:
    for rank, (_, value) in enumerate(parsed):
        with _sent_by(f"rank {own}: rank {rank}"):
            found = _read(kind, value)
        yield found
