"""Exceptions of ranks, sent to the caller's process."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paceline._launch.messages import pack_exception, unpack_exception


class Detailed(Exception):
    """Its constructor needs other arguments than those in `args`."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(f"{what} with {code}")
        self.code = code


def travelled(fail: Callable[[], Any]) -> tuple[Exception | None, str, str]:
    """Return what the caller receives when a call raises."""
    try:
        fail()
    except BaseException as error:
        return unpack_exception(pack_exception(error))
    raise AssertionError("it raised nothing")


def fail(error: BaseException) -> None:
    raise error


def fail_with_a_lock() -> None:
    error = ValueError("kept")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def fail_by_a_local_class() -> None:
    class Own(Exception):
        pass

    raise Own("mine")


def fail_by_a_class_with_a_lock() -> None:
    class Stuck(Exception):
        lock = threading.Lock()

    raise Stuck("words")


@pytest.mark.parametrize(
    ("call", "name", "words"),
    [
        (lambda: fail(ValueError("bad value")), "ValueError", "bad value"),
        (lambda: {}["a key"], "KeyError", "'a key'"),
        (lambda: torch.ones(2) + torch.ones(3), "RuntimeError", "size of tensor"),
        (lambda: 1 / 0, "ZeroDivisionError", "division"),
        (lambda: fail(OSError(28, "full")), "OSError", "full"),
        (lambda: os.stat("/no/such/file"), "FileNotFoundError", "No such file"),
        (lambda: b"\xff".decode(), "UnicodeDecodeError", "invalid start byte"),
        (lambda: fail(StopIteration(1)), "StopIteration", "1"),
        (
            lambda: subprocess.run("false", check=True),
            "CalledProcessError",
            "exit status",
        ),
        (lambda: fail(Detailed("odd", code=7)), "Detailed", "odd with 7"),
        (fail_by_a_local_class, "Own", "mine"),
    ],
)
def test_an_exception_arrives_as_it_was_raised(call, name, words):
    error, its_name, text = travelled(call)
    assert type(error).__name__ == its_name == name
    assert words in str(error)
    assert text.startswith("Traceback (most recent call last):")
    assert f'File "{__file__}", line ' in text
    assert words in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_a_group_arrives_with_what_it_holds():
    group = vars(builtins)["ExceptionGroup"]
    error, _, _ = travelled(lambda: fail(group("two", [ValueError(1)])))
    assert repr(error) == "ExceptionGroup('two', [ValueError(1)])"


def test_attributes_arrive_but_for_those_that_do_not_pickle():
    error, _, _ = travelled(lambda: fail(Detailed("odd", code=7)))
    assert isinstance(error, Detailed)
    assert error.code == 7
    error, _, text = travelled(fail_with_a_lock)
    assert isinstance(error, ValueError)
    assert not hasattr(error, "lock")
    assert "kept" in text


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (fail_by_a_class_with_a_lock, "Stuck"),
        (lambda: fail(SystemExit(3)), "SystemExit"),
        (lambda: fail(KeyboardInterrupt()), "KeyboardInterrupt"),
    ],
)
def test_what_cannot_be_raised_here_arrives_as_its_traceback(call, name):
    error, its_name, text = travelled(call)
    assert (error, its_name) == (None, name)
    assert name in text.splitlines()[-1]
