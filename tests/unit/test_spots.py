"""Spots: places where code may change, compared by identity."""

import gc
import sys
import weakref

import pytest
from natives import _torch  # hands torch to the native module
from paceline import _native
from test_native_life import assert_leaves_nothing

assert _torch


def make_cell(value):
    def read():
        return value

    return read.__closure__[0]


class Kind:
    """Has an attribute."""

    value = 1


class Heir(Kind):
    """Has it too."""


def function(x=1):
    return x


def set_cell(cell, value):
    cell.cell_contents = value


CHANGES = {
    "an entry": (lambda: ({"a": 1}, "a"), lambda place: place[0].update(a=2)),
    "an entry that goes": (lambda: ({"a": 1}, "a"), lambda place: place[0].clear()),
    "an entry that comes": (lambda: ({}, "a"), lambda place: place[0].update(a=1)),
    "a cell": (lambda: make_cell(1), lambda cell: set_cell(cell, 2)),
    "a list": (lambda: [1, 2], lambda place: place.append(3)),
    "an item of a list": (lambda: [1, 2], lambda place: place.__setitem__(0, [])),
    "code": (
        lambda: type(function)(function.__code__, {}),
        lambda place: setattr(place, "__code__", (lambda x: 0).__code__),
    ),
    "defaults": (
        lambda: type(function)(function.__code__, {}),
        lambda place: setattr(place, "__defaults__", (2,)),
    ),
}


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_a_spot_that_changes_is_found_until_it_is_accepted(make, change):
    place = make()
    spots = _native.Spots([({"other": 1}, "other"), place, [1]])
    assert list(spots.differing()) == []
    change(place)
    assert list(spots.differing()) == [1]
    spots.accept()
    assert list(spots.differing()) == []


def test_a_class_differs_where_it_or_its_bases_have_changed():
    spots = _native.Spots([Heir])
    _ = Heir.value  # whoever asks a class for something gives it a version
    spots.accept()
    assert list(spots.differing()) == []
    Kind.value += 1
    assert list(spots.differing()) == [0]
    _ = Heir.value
    spots.accept()
    assert list(spots.differing()) == []
    Heir.own = 1
    assert list(spots.differing()) == [0]


def test_what_comes_back_is_no_difference_and_nothing_is_called():
    class Loud:
        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = None

    held = {"a": Loud()}
    before = held["a"]
    spots = _native.Spots([(held, "a"), [before]])
    held["a"] = Loud()
    assert list(spots.differing()) == [0]
    held["a"] = before
    assert list(spots.differing()) == []


@pytest.mark.parametrize("place", [1, "a", (1, "a"), ({}, 1), ({},), {}])
def test_what_is_no_spot_is_refused(place):
    with pytest.raises(TypeError):
        _native.Spots([[], place])


def test_spots_that_come_and_go_leave_nothing():
    held, cell, items = {"a": object()}, make_cell(object()), [object()]
    things = [held, held["a"], cell, items, items[0], function, Kind]

    def cycle():
        spots = _native.Spots([(held, "a"), cell, items, function, Kind])
        spots.differing()
        spots.accept()

    for _ in range(3):
        cycle()
    gc.collect()
    before = [sys.getrefcount(thing) for thing in things]
    assert_leaves_nothing(cycle, 1000)
    assert [sys.getrefcount(thing) for thing in things] == before


def test_spots_in_a_cycle_are_collected():
    thing = Heir()
    held = {"thing": thing}
    held["spots"] = _native.Spots([(held, "thing"), (held, "spots"), [held]])
    held["spots"].accept()
    watcher = weakref.ref(thing)
    del thing, held
    gc.collect()
    assert watcher() is None
