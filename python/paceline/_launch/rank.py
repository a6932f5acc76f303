"""What a rank of :func:`paceline.launch` runs, in a process of its own."""

from __future__ import annotations

import linecache
import os
import pickle
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from paceline import _errors, _native
from paceline._launch import init, payloads

KIND_CALL = 1
"""A request: the payload is a pickled :class:`Call`."""
KIND_RESULT = 2
"""An answer: the payload is what the function returned, packed."""
KIND_FAILED = 3
"""An answer: the payload is a pickled :class:`Failure`."""

OWN_VARIABLES = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
"""With these ``env://`` connects to the caller's store; no rank listens itself."""
_AGENT_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What Gloo says on ranks whose peer has gone."""


@dataclass(frozen=True)
class Call:
    """What a rank is to do.

    Attributes
    ----------
    packed : bytes
        Function and arguments, by :func:`payloads.pack_call`.
    backend, timeout
        As for :func:`paceline.init`.
    sources : dict
        Entries of ``linecache`` for code without a file, such as a notebook's cells.
    """

    packed: bytes
    backend: str | None
    timeout: Any
    sources: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """Why a rank failed.

    Attributes
    ----------
    packed : bytes
        The exception, by ``_errors.pack_exception``.
    time : float
        Of ``time.monotonic()``, which is one clock for all processes.
    is_consequence : bool
        Whether it tells of another rank's end.
    """

    packed: bytes
    time: float
    is_consequence: bool


class Rank:
    """Answers the one request of a rank: a call."""

    def handle(
        self, kind: int, payload: bytes, tensors: list[Any], flags: bytes
    ) -> tuple[int, bytes, list[Any]]:
        """Return the answer's kind and payload."""
        try:
            return KIND_RESULT, _run(pickle.loads(payload)), []
        except BaseException as error:
            error = _without_own_frames(error)
            failure = Failure(
                _errors.pack_exception(error), time.monotonic(), _is_consequence(error)
            )
            error.__traceback__ = None  # its frames hold the function's variables
            return KIND_FAILED, pickle.dumps(failure), []


def _run(call: Call) -> bytes:
    """Join the world, call the function, leave the world; return the packed result."""
    linecache.cache.update(call.sources)
    for name in list(os.environ):
        if name.startswith(_AGENT_PREFIXES) and name not in OWN_VARIABLES:
            del os.environ[name]  # of a launcher that started the caller
    fn, args, kwargs = payloads.unpack(call.packed)
    init.join(call.backend, call.timeout)
    try:
        result = fn(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        result = None
    try:
        packed = payloads.pack(result)
    except Exception as error:
        raise TypeError(
            f"what fn returned (a {type(result).__name__}) cannot be sent to the "
            f"caller: {type(error).__name__}: {error}"
        ) from error
    if dist.is_initialized():
        dist.destroy_process_group()
    return packed


def _without_own_frames(error: BaseException) -> BaseException:
    """Leave out of a traceback what is not the user's: the frames of this file."""
    traceback = error.__traceback__
    while traceback and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return error.with_traceback(traceback or error.__traceback__)


def _is_consequence(error: BaseException | None) -> bool:
    """Tell whether an error, or what it came from, tells of another rank's end."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (_native.PeerError, dist.DistError)):
            return True
        if isinstance(error, RuntimeError) and any(w in str(error) for w in _LOST_PEER):
            return True
        error = error.__cause__ or error.__context__
    return False
