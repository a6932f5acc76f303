"""What the tests of snapshots share."""

from paceline import _native
from paceline._compat import torch_core

torch_core.attach()


class Set(set):
    """A subclass with attributes."""


class AlwaysEqual:
    def __eq__(self, other):
        return True

    __hash__ = None


class Loud:
    """Says so where it is compared, hashed or asked for its truth."""

    def __eq__(self, other):
        raise AssertionError("compared")

    def __bool__(self):
        raise AssertionError("asked")

    def __hash__(self):
        return 1


def make_cell(*values):
    value = None

    def read():
        return value

    (value,) = values or (None,)
    return read.__closure__[0]


def make_class():
    return type("Kind", (), {"value": 1})


def make_function():
    def function(x=1, *, y=2):
        return x + y

    return function


def watch(*objects):
    """Return a snapshot of some objects, at indices from 0 on."""
    snapshot = _native.Snapshot()
    assert [snapshot.add(one) for one in objects] == list(range(len(objects)))
    return snapshot
