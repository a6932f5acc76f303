"""The caller's side of what worker processes answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline import _errors, _native
from paceline._workers import log_records
from paceline._workers import main as worker_main

Reply = tuple[bytes, list[Any], bytes]


def wait(
    channels: Iterable[_native.Channel],
    copies: bool,
    first: int = 1,
    error_of: Callable[[int, bytes], Exception | None] | None = None,
    records: log_records.Records | None = None,
) -> tuple[list[Reply], list[Exception]]:
    """Return the answers of some replicas, and what they raised, the lowest's first.

    The channels are to replicas `first`, `first` + 1, ...  Where `copies` is False,
    tensors are views that the next request overwrites.  `error_of` returns the error
    that the kind and the payload of an answer stand for, if any.  `records` gets what
    the replicas have logged, which is handled here otherwise.
    """
    answers: list[Reply] = []
    errors: list[Exception] = []
    logged: log_records.Records = [] if records is None else records
    for k, channel in enumerate(channels, start=first):
        try:
            kind, payload, tensors, flags = channel.wait(copy=copies)
        except _native.PeerError as error:
            errors.append(error)
            continue
        kind, payload = log_records.split(kind, payload, k, logged)
        failure = error_of(kind, payload) if error_of is not None else None
        if kind == worker_main.KIND_ERROR:
            failure = _errors.unpack_exception(payload, k, "cpu")
        if failure is not None:
            errors.append(failure)
        answers.append((payload, tensors, flags))
    if records is None:
        log_records.handle(logged)
    return answers, errors
