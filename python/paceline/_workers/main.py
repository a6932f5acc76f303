"""What a worker process runs: ``python -m paceline._workers.main``.

The arguments are descriptors and the handler's name.  Everything else comes as the
first request of the channel, so that it may be of any size: the cores, which must be
known before torch is imported, the search path, what to restore.
"""

from __future__ import annotations

import bdb
import importlib
import json
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Any, NoReturn, Protocol

from paceline import _native
from paceline._errors import pack_exception
from paceline._workers import log_records

KIND_QUIT = 0
"""A request: end this process."""
KIND_PREPARE = 254
"""A request, always the first one: the payload is JSON, as `prepare` reads them."""
KIND_ERROR = 255
"""An answer: an exception, as ``_errors.pack_exception`` packs it."""

SAFE_PATH = "PYTHONSAFEPATH"
_UNWANTED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Set for this process alone, and read by the C library before it began."""


class Handler(Protocol):
    """What answers requests."""

    def handle(
        self, kind: int, payload: bytes, tensors: list[Any], flags: bytes
    ) -> tuple[int, bytes, list[Any]]:
        """Return kind, payload and tensors of the answer."""
        ...


def prepare(payload: bytes) -> None:
    """Make this process resemble the one that it works for.

    The payload is JSON: ``cores`` (list of int; empty: stay as it is), ``threads``,
    ``path``, ``argv``, ``environ`` (names to restore, None where one is to go) and
    ``is_program`` (as in ``spawn.Role``).
    """
    surroundings = json.loads(payload)
    if surroundings["cores"]:
        os.sched_setaffinity(0, surroundings["cores"])
    sys.path[:] = surroundings["path"]
    sys.argv[:] = surroundings["argv"]
    for name, value in surroundings["environ"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if surroundings["is_program"]:
        return
    for name in _UNWANTED:
        os.environ.pop(name, None)
    log_records.collect()
    _skip_breakpoints()


def _set_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(  # type: ignore[union-attr]
                encoding="utf-8", errors="backslashreplace", line_buffering=True
            )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def _make_handler(name: str, n_threads: int) -> Handler:
    import torch

    from paceline._compat import torch_core

    torch_core.attach()
    torch.set_num_threads(n_threads)
    module, _, attribute = name.partition(":")
    handler: Handler = getattr(importlib.import_module(module), attribute)()
    return handler


def _answer_error(channel: _native.Channel, error: BaseException) -> None:
    payload = pack_exception(error)
    error.__traceback__ = None  # its frames hold what the request brought
    _answer(channel, KIND_ERROR, payload, [])


def _answer(
    channel: _native.Channel, kind: int, payload: bytes, tensors: list[Any]
) -> None:
    """Answer, after what was printed, and with what was logged."""
    _flush()
    channel.answer(*log_records.with_records(kind, payload), tensors)
    log_records.have_left()


def _begin(channel: _native.Channel, name: str) -> tuple[Handler, bool]:
    """Return the handler, and whether this process is a program of its own."""
    _, payload, _, _ = channel.next()
    surroundings = json.loads(payload)
    is_program = bool(surroundings["is_program"])
    if is_program:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        prepare(payload)
        handler = _make_handler(name, surroundings["threads"])
    except BaseException as error:
        _answer_error(channel, error)
        _quit(1)
    _answer(channel, KIND_PREPARE, b"", [])
    return handler, is_program


def _skip_breakpoints() -> None:
    """Have breakpoints in a model's code stop in the caller's process alone."""
    sys.breakpointhook = _skip_breakpoint
    bdb.Bdb.set_trace = _skip_trace  # type: ignore[method-assign, assignment]


def _skip_breakpoint(*_: Any, **__: Any) -> None:
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        _report_breakpoint(sys._getframe(1))


def _skip_trace(debugger: Any, frame: FrameType | None = None, *_: Any) -> None:
    """Do what pdb.set_trace() ends in, and what other debuggers end in."""
    _report_breakpoint(frame or sys._getframe(1))


def _report_breakpoint(frame: FrameType) -> None:
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    log_records.write(
        f"paceline: the breakpoint at {place} stops in replica 0 alone; worker "
        "processes skip it"
    )


def serve(channel: _native.Channel, handler: Handler) -> None:
    """Answer requests, errors too, until one says that it was the last."""
    while True:
        try:
            kind, payload, tensors, flags = channel.next()
            if kind == KIND_QUIT:
                return
            answer = handler.handle(kind, payload, tensors, flags)
            del payload, tensors, flags
            _answer(channel, *answer)
            del answer
        except BaseException as error:
            if not channel.is_busy:
                raise  # not of a request: the channel itself is at an end
            _answer_error(channel, error)


def _quit(status: int) -> NoReturn:
    """End at once: torch takes its time to be taken apart, and nobody needs it."""
    _flush()
    os._exit(status)


def main() -> NoReturn:
    """Serve the group that started this process, until it or its process ends."""
    request_fd, answer_fd, parent_fd, pipe_fd = map(int, sys.argv[1:5])
    name = sys.argv[5]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (parent_fd, pipe_fd):
        if fd >= 0:
            os.set_inheritable(fd, False)
    _native.die_with(parent_fd, pipe_fd)
    _set_streams()
    channel = _native.Channel(request_fd, answer_fd)
    os.close(request_fd)
    os.close(answer_fd)
    os.register_at_fork(after_in_child=_native.forget_channels)
    handler, is_program = _begin(channel, name)
    try:
        serve(channel, handler)
    except BaseException:
        traceback.print_exc()
        _quit(1)
    if is_program:
        sys.exit(0)  # its threads are waited for, its exit handlers run
    _quit(0)


if __name__ == "__main__":
    # Under its own name, so that what a handler imports is this very module.
    from paceline._workers import main as worker_main

    worker_main.main()
