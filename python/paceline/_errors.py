"""What a replica raises, raised in the caller: torch's message, the exception's type.

Exceptions of worker processes come as bytes: :func:`pack_exception` makes them there.
"""

from __future__ import annotations

import copy
import pickle
import traceback
from typing import Any


def as_of_replica(error: BaseException, replica: int, device: Any) -> BaseException:
    """Return the exception that tells the caller what failed in a replica.

    It has the type and the attributes of `error`, even where its constructor takes
    other arguments; its message is torch's, with the traceback of the replica.  What is
    no ``Exception`` (``SystemExit``) comes as a ``RuntimeError``.
    """
    text = "".join(traceback.format_exception(error))
    message = _message_of(type(error).__name__, text, replica, device)
    if not isinstance(error, Exception):
        return RuntimeError(message)
    return _with_message(_renewed(error), message)


def _message_of(name: str, text: str, replica: int, device: Any) -> str:
    """Return what torch says of an exception in a replica; `text` is its traceback."""
    return f"Caught {name} in replica {replica} on device {device}.\nOriginal {text}"


def _with_message(error: Exception, message: str) -> Exception:
    """Return an exception with a message; as its cause, where its type hides it."""
    if isinstance(error, KeyError):
        from paceline._compat import torch_core  # late: workers set their cores first

        error.args = (torch_core.key_error_message(message),)
    else:
        error.args = (message,)
    if isinstance(error, ImportError):
        error.msg = message
    if not _shows(error, message):
        error.__cause__ = RuntimeError(message)
    return error


def _renewed(error: Exception) -> Exception:
    """Return a copy without the traceback, which would keep the replica's frames."""
    kind = type(error)
    try:
        renewed = copy.copy(error)
        if type(renewed) is kind and renewed is not error:
            return renewed
    except Exception:  # the constructor wants other arguments
        pass
    renewed = kind.__new__(kind, *error.args)
    renewed.__dict__.update(error.__dict__)
    return renewed


def _shows(error: BaseException, message: str) -> bool:
    try:
        return message in str(error)
    except Exception:
        return False


# ---- between processes --------------------------------------------------------------


def pack_exception(error: BaseException) -> bytes:
    """Return the bytes that :func:`unpack_exception` makes the exception of.

    They are a pickle of the exception's own pickle, that of its type and attributes,
    its type's name, and the formatted traceback; each of the first two may be None.
    """
    text = "".join(traceback.format_exception(error))
    whole = parts = None
    if isinstance(error, Exception):
        whole = _try_pickle(error)
        parts = _try_pickle((type(error), dict(vars(error))))
        parts = parts or _try_pickle((type(error), {}))
    return pickle.dumps((whole, parts, type(error).__name__, text))


def unpack_exception(packed: bytes, replica: int, device: Any) -> Exception:
    """Return what a replica raised, as `as_of_replica` makes it, to be raised here.

    A ``RuntimeError`` where the type cannot come here, or is none to be raised here.
    """
    whole, parts, name, text = pickle.loads(packed)
    message = _message_of(name, text, replica, device)
    error = _rebuild(whole, parts)
    if error is None:
        return RuntimeError(message)
    try:
        return _with_message(error, message)
    except Exception:  # a type that takes no message
        return RuntimeError(message)


def unpack_original(packed: bytes) -> tuple[Exception | None, str, str]:
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
    # A constructor that wants other arguments than it left in `args`.
    kind_and_attributes = _try_unpickle(parts)
    if kind_and_attributes is None:
        return None
    kind, attributes = kind_and_attributes
    try:
        error = kind.__new__(kind)
        error.__dict__.update(attributes)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None
