"""A rank's call: join the world, run the function, leave the world."""

from __future__ import annotations

import linecache
import os

import torch.distributed as dist

from paceline import _native
from paceline._compat import torch_groups
from paceline._launch import init, payloads
from paceline._launch.launchers import find_launch
from paceline._launch.messages import Call, Failure, Result, pack_exception

OWN_VARIABLES = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
"""With these ``env://`` connects to the caller's store; no rank listens itself."""
_AGENT_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Gloo's messages on ranks whose peer is gone."""


def run(call: Call) -> Result | Failure:
    """Return the result of a call, or why it failed."""
    try:
        return _run(call)
    except BaseException as error:
        error = _without_own_frames(error)
        return Failure(pack_exception(error), _is_consequence(error))


def _run(call: Call) -> Result:
    """Join the world, call the function, leave the world; return the result."""
    linecache.cache.update(call.sources)
    for name in list(os.environ):
        if name.startswith(_AGENT_PREFIXES) and name not in OWN_VARIABLES:
            del os.environ[name]  # of a launcher that started the caller
    fn, args, kwargs = payloads.unpack(call.packed)
    init.join(find_launch(os.environ), call.backend, call.timeout, is_quiet=True)
    try:
        result = fn(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        result = None
    answer = payloads.pack_result(result)
    if dist.is_initialized():
        torch_groups.end_all()
    return answer


def _without_own_frames(error: BaseException) -> BaseException:
    """Remove the frames of this file from a traceback: they are not the user's."""
    traceback = error.__traceback__
    while traceback and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return error.with_traceback(traceback or error.__traceback__)


def _is_consequence(error: BaseException | None) -> bool:
    """Tell whether an error, or one of its causes, reports another rank's end."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (_native.PeerError, dist.DistError)):
            return True
        if isinstance(error, RuntimeError) and any(w in str(error) for w in _LOST_PEER):
            return True
        error = error.__cause__ or error.__context__
    return False
