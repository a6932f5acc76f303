"""A handler for workers in tests: it sends back what comes, or runs what it is told."""

from __future__ import annotations

from typing import Any

ECHO = 1
RUN = 2


class Echo:
    """Answers requests of kind `RUN` by running their words as Python.

    They find ``tensors`` and ``flags``, and may leave ``words`` and ``reply`` to be the
    words and tensors of the answer.
    """

    def handle(
        self, kind: int, words: bytes, tensors: list[Any], flags: bytes
    ) -> tuple[int, bytes, list[Any]]:
        if kind != RUN:
            return kind, words, tensors
        scope: dict[str, Any] = {"tensors": tensors, "flags": flags}
        exec(words.decode(), scope)
        return kind, scope.get("words", b""), scope.get("reply", [])


class Broken:
    """Cannot be made."""

    def __init__(self) -> None:
        print("about to fail")
        raise LookupError("no such model")
