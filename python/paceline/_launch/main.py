"""The program of a rank's process: answer one call, then end.

Importing torch takes seconds, so the rank begins to watch its caller before it does.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from paceline import _native
from paceline._launch.messages import Call, Failure, Result, pack_exception


def main() -> None:
    """Answer one call of the process that started this one; end if it ends."""
    answer_fd, call_fd, caller_fd, pipe_fd = map(int, sys.argv[1:])
    for fd in (answer_fd, call_fd, caller_fd, pipe_fd):
        if fd >= 0:  # caller_fd is -1 if the caller has no pidfd
            os.set_inheritable(fd, False)
    _native.die_with(caller_fd, pipe_fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_streams()
    answers = Connection(answer_fd, readable=False)
    os.register_at_fork(after_in_child=answers.close)
    with mmap.mmap(call_fd, 0, access=mmap.ACCESS_READ) as memory:
        call: Call = pickle.loads(memory)
    os.close(call_fd)
    sys.argv[:] = call.argv
    answer = _answer(call)
    _flush()
    with answers:
        answers.send_bytes(pickle.dumps(answer))


def _answer(call: Call) -> Result | Failure:
    """Return the result of the call, or why it failed."""
    try:
        from paceline._launch import rank

        return rank.run(call)
    except BaseException as error:  # torch cannot be imported
        return Failure(pack_exception(error))


def _set_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(  # type: ignore[union-attr]
                encoding="utf-8", errors="backslashreplace", line_buffering=True
            )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
