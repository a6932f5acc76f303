"""What the caller and the process of a rank send to each other: a call, and a failure.

torch is not imported here: ``main.py`` says why.
"""

from __future__ import annotations

import pickle
import time
import traceback
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """What a rank is to do.

    Attributes
    ----------
    packed : bytes
        Function and arguments, by ``payloads.pack_call``.
    backend, timeout
        As for :func:`paceline.init`.
    sources : dict
        Entries of ``linecache`` for code without a file, such as a notebook's cells.
    argv : list of str
        The caller's ``sys.argv``.
    """

    packed: bytes
    backend: str | None
    timeout: float | None
    sources: dict[str, Any]
    argv: list[str]


@dataclass(frozen=True)
class Failure:
    """An exception of a rank.

    Attributes
    ----------
    packed : bytes
        The exception, by :func:`pack_exception`.
    is_consequence : bool
        Whether it tells of another rank's end.
    time : float
        Of ``time.monotonic()``, which is one clock for all processes.
    """

    packed: bytes
    is_consequence: bool = False
    time: float = field(default_factory=time.monotonic)


def pack_exception(error: BaseException) -> bytes:
    """Return the bytes that :func:`unpack_exception` makes the exception of.

    They are a pickle of the exception's own pickle, that of its type, arguments and
    attributes, its type's name, and the formatted traceback; each of the first two may
    be None.
    """
    text = "".join(traceback.format_exception(error))
    whole = parts = None
    if isinstance(error, Exception):
        whole = _try_pickle(error)
        parts = _try_pickle((type(error), error.args, dict(vars(error))))
        parts = parts or _try_pickle((type(error), (), {}))
    return pickle.dumps((whole, parts, type(error).__name__, text))


def unpack_exception(packed: bytes) -> tuple[Exception | None, str, str]:
    """Return an exception as it was raised, its type's name, and its traceback as text.

    None in place of the exception where it cannot come here.
    """
    whole, parts, name, text = pickle.loads(packed)
    return _rebuild(whole, parts), name, text


def _try_pickle(value: Any) -> bytes | None:
    try:
        import cloudpickle  # type: ignore[import-untyped]

        pickled: bytes = cloudpickle.dumps(value)
    except Exception:
        return None
    return pickled


def _try_unpickle(pickled: bytes | None) -> Any:
    try:
        return None if pickled is None else pickle.loads(pickled)
    except Exception:
        return None


def _rebuild(whole: bytes | None, parts: bytes | None) -> Exception | None:
    """Return the exception, or None where it cannot come here."""
    error = _try_unpickle(whole)
    if isinstance(error, Exception):
        return error
    try:  # its constructor wants other arguments than it left in `args`
        kind, args, attributes = _try_unpickle(parts)
        error = kind.__new__(kind, *args)
        error.__dict__.update(attributes)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None
