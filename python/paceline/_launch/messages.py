"""The messages between the caller and the process of a rank: a call, and a failure.

torch is not imported here: ``main.py`` has the reason.
"""

from __future__ import annotations

import pickle
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """The call that a rank makes."""

    packed: bytes  # function and arguments, by ``payloads.pack_call``
    backend: str | None  # as for :func:`paceline.init`
    timeout: float | None  # likewise
    sources: dict[str, Any]  # of ``linecache``, for code without a file: notebook cells
    argv: list[str]  # the caller's ``sys.argv``


@dataclass(frozen=True)
class Result:
    """What the function of a rank returned."""

    name: str  # for errors
    packed: bytes
    problem: str = ""  # why it could not be packed


@dataclass(frozen=True)
class Failure:
    """An exception of a rank."""

    packed: bytes  # by :func:`pack_exception`
    is_consequence: bool = False  # it reports that another rank ended
    time: float = field(default_factory=time.monotonic)  # all processes share the clock


def pack_exception(error: BaseException) -> bytes:
    """Return bytes from which :func:`unpack_exception` rebuilds the exception.

    They pickle four values: the pickled exception; its pickled type, arguments and
    attributes; the name of its type; the formatted traceback.  Each of the first two
    may be None.
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

    The exception is None if it cannot be rebuilt here.
    """
    whole, parts, name, text = pickle.loads(packed)
    for rebuild, form in ((pickle.loads, whole), (_from_parts, parts)):
        with suppress(Exception):  # it may be None, too
            error = rebuild(form)
            if isinstance(error, Exception):
                return error, name, text
    return None, name, text


def _try_pickle(value: Any) -> bytes | None:
    try:
        import cloudpickle  # type: ignore[import-untyped]

        pickled: bytes = cloudpickle.dumps(value)
    except Exception:
        return None
    return pickled


def _from_parts(packed: Any) -> Any:
    """Make an exception whose constructor may need other arguments than its `args`."""
    kind, args, attributes = pickle.loads(packed)
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error
