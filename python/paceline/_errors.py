"""What a replica raises, raised in the caller: torch's words, the exception's type."""

from __future__ import annotations

import copy
import traceback
from typing import Any


def as_of_replica(error: BaseException, replica: int, device: Any) -> BaseException:
    """Return the exception that tells the caller what failed in a replica.

    Parameters
    ----------
    error : BaseException
        As it was raised in the replica, its traceback with it.
    replica : int
        Which replica.
    device : torch.device or str
        The device that it ran on.

    Returns
    -------
    BaseException
        Of the same type and with the same attributes, even where its constructor takes
        other arguments; its message is torch's, with the traceback of the replica. What
        is no ``Exception`` (``SystemExit``) comes as a ``RuntimeError``.
    """
    text = "".join(traceback.format_exception(error))
    words = in_words(type(error).__name__, text, replica, device)
    if not isinstance(error, Exception):
        return RuntimeError(words)
    return tell(_renewed(error), words)


def in_words(name: str, text: str, replica: int, device: Any) -> str:
    """Return what torch says of an exception in a replica; `text` is its traceback."""
    return f"Caught {name} in replica {replica} on device {device}.\nOriginal {text}"


def tell(error: Exception, words: str) -> Exception:
    """Return an exception with other words; as its cause, where its type hides them."""
    if isinstance(error, KeyError):
        from paceline import _torch  # late: workers set their cores first

        error.args = (_torch.key_error_message(words),)
    else:
        error.args = (words,)
    if isinstance(error, ImportError):
        error.msg = words
    if not _says(error, words):
        error.__cause__ = RuntimeError(words)
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


def _says(error: BaseException, words: str) -> bool:
    try:
        return words in str(error)
    except Exception:
        return False
