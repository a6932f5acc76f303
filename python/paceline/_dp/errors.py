"""What a replica raised, as the caller sees it: torch's message, the same type."""

from __future__ import annotations

import copy
import traceback
from typing import Any

from paceline._compat import torch_core


def as_of_replica(error: BaseException, replica: int, device: Any) -> BaseException:
    """Return the exception that tells the caller what failed in a replica.

    It has the type and the attributes of `error`, even where its constructor takes
    other arguments; its message is torch's, with the traceback of the replica.  What is
    no ``Exception`` (``SystemExit``), or cannot be made again, comes as a
    ``RuntimeError``.
    """
    text = "".join(traceback.format_exception(error))
    name = type(error).__name__
    message = f"Caught {name} in replica {replica} on device {device}.\nOriginal {text}"
    if not isinstance(error, Exception):
        return RuntimeError(message)
    try:
        return _with_message(_renewed(error), message)
    except Exception:  # a type that can be neither made nor given a message
        return RuntimeError(message)


def _with_message(error: Exception, message: str) -> Exception:
    """Return an exception with a message; as its cause, where its type hides it."""
    if isinstance(error, KeyError):
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
