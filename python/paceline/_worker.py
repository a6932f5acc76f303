"""What a worker process runs: ``python -m paceline._worker``, started by a crew.

The arguments are descriptors and the handler's name.  Everything else comes as the
first request of the channel, so that it may be of any size: the cores, which must be
known before torch is imported, the search path, what to restore.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any, NoReturn, Protocol

from paceline import _native
from paceline._remote import pack_exception

KIND_QUIT = 0
"""A request: end this process."""
KIND_PREPARE = 254
"""A request, always the first one: `words` are JSON, as `prepare` reads them."""
KIND_ERROR = 255
"""An answer: an exception, as ``_remote.pack_exception`` puts it into words."""

SAFE_PATH = "PYTHONSAFEPATH"
_UNWANTED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Set for this process alone, and read by the C library before it began."""


class Handler(Protocol):
    """What answers requests."""

    def handle(
        self, kind: int, words: bytes, tensors: list[Any], flags: bytes
    ) -> tuple[int, bytes, list[Any]]:
        """Return kind, words and tensors of the answer."""
        ...


def prepare(words: bytes) -> None:
    """Make this process resemble the one that it works for.

    Parameters
    ----------
    words : bytes
        JSON: ``cores`` (list of int; empty: stay as it is), ``threads``, ``path``,
        ``argv`` and ``environ`` (names to restore, None where one is to go).
    """
    told = json.loads(words)
    if told["cores"]:
        os.sched_setaffinity(0, told["cores"])
    sys.path[:] = told["path"]
    sys.argv[:] = told["argv"]
    for name, value in told["environ"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for name in _UNWANTED:
        os.environ.pop(name, None)


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

    from paceline import _torch

    _torch.attach()
    torch.set_num_threads(n_threads)
    module, _, attribute = name.partition(":")
    handler: Handler = getattr(importlib.import_module(module), attribute)()
    return handler


def _answer_error(channel: _native.Channel, error: BaseException) -> None:
    words = pack_exception(error)
    error.__traceback__ = None  # its frames hold what the request brought
    _flush()
    channel.answer(KIND_ERROR, words, [])


def _begin(channel: _native.Channel, name: str) -> Handler:
    _, words, _, _ = channel.next()
    try:
        prepare(words)
        handler = _make_handler(name, json.loads(words)["threads"])
    except BaseException as error:
        _answer_error(channel, error)
        _quit(1)
    channel.answer(KIND_PREPARE, b"", [])
    return handler


def serve(channel: _native.Channel, handler: Handler) -> None:
    """Answer requests until one says that it was the last.

    Parameters
    ----------
    channel : paceline._native.Channel
        The worker's end.
    handler : Handler
        Called with each request but the last; what it raises is the answer.
    """
    while True:
        try:
            kind, words, tensors, flags = channel.next()
            if kind == KIND_QUIT:
                return
            answer = handler.handle(kind, words, tensors, flags)
            del words, tensors, flags
            _flush()
            channel.answer(*answer)
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
    """Serve the crew that started this process, until it or its process ends."""
    request_fd, answer_fd, parent_fd, pipe_fd = (int(word) for word in sys.argv[1:5])
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
    handler = _begin(channel, name)
    try:
        serve(channel, handler)
    except BaseException:
        traceback.print_exc()
        _quit(1)
    _quit(0)


if __name__ == "__main__":
    # Under its own name, so that what a handler imports is this very module.
    from paceline import _worker

    _worker.main()
