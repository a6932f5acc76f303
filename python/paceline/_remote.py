"""Exceptions that cross from a worker process to the caller's."""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NoReturn

from paceline._errors import in_words, tell


def pack_exception(error: BaseException) -> bytes:
    """Put an exception into words that ``_crew.raise_remote`` raises.

    Parameters
    ----------
    error : BaseException
        Being handled, so that it has a traceback.

    Returns
    -------
    bytes
        A pickle of the exception's own pickle, that of its type and attributes, its
        type's name, and the formatted traceback; each of the first two may be None.
    """
    text = "".join(traceback.format_exception(error))
    whole = _try_pickle(error) if isinstance(error, Exception) else None
    parts = None
    if isinstance(error, Exception):
        parts = _try_pickle((type(error), dict(vars(error))))
        if parts is None:
            parts = _try_pickle((type(error), {}))
    return pickle.dumps((whole, parts, type(error).__name__, text))


def _try_pickle(value: Any) -> bytes | None:
    try:
        import cloudpickle  # type: ignore[import-untyped]

        words: bytes = cloudpickle.dumps(value)
    except Exception:
        return None
    return words


def error_of(words: bytes, replica: int, device: Any) -> Exception:
    """Return what a replica raised, to be raised in the caller.

    Parameters
    ----------
    words : bytes
        Of `pack_exception`.
    replica : int
        Which replica it was.
    device : torch.device or str
        Where that replica lives, as in ``"cpu"``.

    Returns
    -------
    Exception
        Of the same type, with the words that ``torch.nn.DataParallel`` gives it: the
        replica, the device, and the replica's own traceback. ``RuntimeError`` where the
        type cannot come here, or is none to be raised here (``SystemExit``).
    """
    whole, parts, name, text = pickle.loads(words)
    message = in_words(name, text, replica, device)
    error = _rebuild(whole, parts)
    if error is None:
        return RuntimeError(message)
    try:
        return tell(error, message)
    except Exception:  # a type that takes no words
        return RuntimeError(message)


def raise_remote(words: bytes, replica: int, device: Any) -> NoReturn:
    """Raise what :func:`error_of` returns."""
    raise error_of(words, replica, device)


def _rebuild(whole: bytes | None, parts: bytes | None) -> Exception | None:
    """Return the exception, or None where it cannot come here."""
    error = _try_unpickle(whole)
    if isinstance(error, Exception):
        return error
    # A constructor that wants other arguments than it left in `args`.
    told = _try_unpickle(parts)
    if told is None:
        return None
    kind, attributes = told
    try:
        error = kind.__new__(kind)
        error.__dict__.update(attributes)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None


def _try_unpickle(words: bytes | None) -> Any:
    if words is None:
        return None
    try:
        return pickle.loads(words)
    except Exception:
        return None
