"""Snapshots in use: deltas, members with code of their own, and life."""

import gc
import sys
import weakref
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from paceline import _native
from snapshots import (
    AlwaysEqual,
    Loud,
    Set,
    make_cell,
    make_class,
    make_function,
    watch,
)
from support.leaks import assert_leaves_nothing
from torch import nn

# ---- delta, accept, drop ------------------------------------------------------------


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_delta_is_what_was_and_what_is(kind):
    live = kind(a=1, b=2, c=3)
    snapshot = watch({}, live)
    assert snapshot.delta(1) == ({}, {})
    live["b"] = 4
    assert snapshot.delta(1) == ({"b": 2}, {"b": 4})
    live["new"] = 5
    assert snapshot.delta(1) == ({"b": 2}, {"b": 4, "new": 5})
    del live["c"]
    before, after = snapshot.delta(1)
    assert before == {"b": 2, "c": 3}
    assert after == {"b": 4, "new": 5}
    snapshot.accept(1)
    assert snapshot.delta(1) == ({}, {})
    live.clear()
    assert snapshot.delta(1) == ({"a": 1, "b": 4, "new": 5}, {})


def test_a_delta_holds_the_very_objects():
    first, second = Loud(), Loud()
    live = {"a": first}
    snapshot = watch(live)
    live["a"] = second
    before, after = snapshot.delta(0)
    assert before["a"] is first
    assert after["a"] is second


def test_the_delta_of_entries_that_changed_places_has_both():
    live = OrderedDict(a=1, b=2)
    snapshot = watch(live)
    live.move_to_end("a")
    before, after = snapshot.delta(0)
    assert list(before) == ["a", "b"]
    assert list(after) == ["b", "a"]


def test_what_is_dropped_is_watched_no_longer_and_its_index_serves_again():
    first, second, third = [1], [2], [3]
    snapshot = watch(first, {})
    snapshot.drop(0)
    first.append(2)
    assert snapshot.differing() == ()
    assert snapshot.add(second) == 0
    assert snapshot.add(third) == 2
    second.append(3)
    third.append(4)
    assert snapshot.differing() == [0, 2]


def test_many_indices_are_dropped_and_serve_again():
    lives = [[i] for i in range(1000)]
    snapshot = watch(*lives)
    for at in range(0, 1000, 3):
        snapshot.drop(at)
    others = [[] for _ in range(0, 1000, 3)]
    assert sorted(map(snapshot.add, others)) == list(range(0, 1000, 3))
    assert snapshot.add([]) == 1000
    for live in lives:
        live.append(1)
    assert snapshot.differing() == [at for at in range(1000) if at % 3]


def test_a_snapshot_keeps_what_it_watches():
    live = Set([1])
    gone = weakref.ref(live)
    snapshot = watch(live)
    del live
    gc.collect()
    assert gone() is not None
    snapshot.drop(0)
    assert gone() is None


def dropped():
    snapshot = watch({}, {})
    snapshot.drop(1)
    return snapshot


def released():
    view = memoryview(bytearray(3))
    view.release()
    return view


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: _native.Snapshot([]), TypeError, "at most 0|takes no|0 arguments"),
        (lambda: watch().add(), TypeError, "add"),
        (lambda: watch().add({}, None, True), TypeError, "positional"),
        (lambda: watch().add(1), TypeError, "'int' object is not iterable"),
        (lambda: watch().add([], "a"), TypeError, "'a' is a name, but list is no"),
        (lambda: watch().add(released()), ValueError, "released"),
        (lambda: watch({}).delta(1), IndexError, "index is 1: this snapshot has 1"),
        (lambda: watch({}).delta(-1), IndexError, "index is -1"),
        (lambda: watch({}).drop(2**80), OverflowError, "too large|too big"),
        (lambda: watch({}).drop("a"), TypeError, "integer"),
        (lambda: watch({}).accept(None), TypeError, "integer"),
        (lambda: dropped().accept(1), IndexError, "index is 1"),
        (lambda: dropped().drop(1), IndexError, "has 2 items, or had"),
        (lambda: watch([]).delta(0), TypeError, "only dictionaries have one"),
    ],
)
def test_a_snapshot_says_what_it_cannot_take(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_what_was_not_taken_has_no_index():
    snapshot = watch({})
    for _ in range(3):
        with pytest.raises(TypeError):
            snapshot.add(1)
    assert snapshot.add({}) == 1


def test_the_delta_of_an_entry_is_refused():
    snapshot = _native.Snapshot()
    at = snapshot.add({"a": 1}, "a")
    with pytest.raises(TypeError, match="only dictionaries have one"):
        snapshot.delta(at)


# ---- code of members ----------------------------------------------------------------


class Asking:
    """Has the snapshot grow as it is dropped, so that its items move in memory."""

    def __init__(self, snapshot):
        self.snapshot = snapshot

    def __del__(self):
        for _ in range(300):
            self.snapshot.add({})


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (list, lambda live: live.clear()),
        (list, lambda live: live.__setitem__(0, 1)),
        (dict.fromkeys, lambda live: live.clear()),
        (OrderedDict.fromkeys, lambda live: live.clear()),
        (set, lambda live: live.clear()),
        (deque, lambda live: live.clear()),
    ],
    ids=["list", "member", "dict", "ordered", "set", "deque"],
)
def test_members_that_ask_the_snapshot_as_they_go_do_no_harm(make, change):
    snapshot = _native.Snapshot()
    live = make([Asking(snapshot), 2])
    at = snapshot.add(live)
    change(live)
    snapshot.accept(at)
    gc.collect()
    assert snapshot.differing() == ()
    snapshot.drop(at)
    assert snapshot.add({}) == at
    assert snapshot.add({}) == 301  # as many have come


def test_a_member_may_drop_others_as_it_goes():
    class Dropping:
        def __del__(self):
            for at in range(1, 300):
                snapshot.drop(at)

    snapshot = _native.Snapshot()
    live = [Dropping()]
    assert snapshot.add(live) == 0
    for i in range(1, 300):
        assert snapshot.add([i]) == i
    live.clear()
    snapshot.drop(0)
    assert snapshot.differing() == ()
    assert [snapshot.add([]) for _ in range(300)] == list(range(300))


@pytest.mark.parametrize(
    "ask",
    [
        lambda snapshot: snapshot.add({}),
        lambda snapshot: snapshot.drop(0),
        lambda snapshot: snapshot.accept(0),
        lambda snapshot: snapshot.delta(0),
        lambda snapshot: snapshot.differing(),
    ],
    ids=["add", "drop", "accept", "delta", "differing"],
)
@pytest.mark.parametrize(
    "compare",
    [lambda snapshot: snapshot.differing(), lambda snapshot: snapshot.accept(1)],
    ids=["in differing", "in accept"],
)
def test_a_snapshot_is_not_changed_while_it_compares(ask, compare):
    errors = []

    class Iterated:
        is_asking = False

        def __iter__(self):
            if self.is_asking:
                with pytest.raises(RuntimeError, match="is being compared") as caught:
                    ask(snapshot)
                errors.append(caught.value)
            return iter([1])

    live = Iterated()
    snapshot = watch({}, live)
    live.is_asking = True
    compare(snapshot)
    assert len(errors) == 1
    live.is_asking = False
    assert snapshot.differing() == ()
    assert snapshot.add({}) == 2


def test_what_can_be_read_no_longer_differs_and_raises_nothing():
    class Breaking:
        is_broken = False

        def __iter__(self):
            if self.is_broken:
                raise LookupError("broken")
            return iter([1])

    live, memory = Breaking(), memoryview(bytearray(3))
    snapshot = watch(live, memory)
    live.is_broken = True
    memory.release()
    assert snapshot.differing() == [0, 1]
    with pytest.raises(LookupError, match="broken"):
        snapshot.accept(0)
    with pytest.raises(ValueError, match="released"):
        snapshot.accept(1)
    live.is_broken = False
    assert snapshot.differing() == [1]  # the first is as it was last accepted


# ---- life ---------------------------------------------------------------------------


def test_a_thousand_snapshots_leave_nothing():
    name, value, other = "kept-under-this-name", object(), object()
    live, owner, tensor = {name: value}, AlwaysEqual(), torch.zeros(3)
    cell, function, kind = make_cell(value), make_function(), make_class()
    grid = np.zeros((4, 6))[:, ::2]

    def once():
        live[name] = value
        snapshot = watch(live, OrderedDict(live), cell, function, kind)
        entry = snapshot.add(live, name)
        live[name] = other
        assert snapshot.differing() == [0, entry]
        snapshot.delta(0)
        snapshot.accept(0)
        snapshot.accept(entry)
        snapshot.drop(snapshot.add([value, other], owner))
        for held in (deque([value]), {name}, tensor, bytearray(3), grid):
            snapshot.accept(snapshot.add(held))
        with pytest.raises(TypeError):
            snapshot.add(1, owner)
        with pytest.raises(TypeError):
            snapshot.add([], name)
        assert snapshot.differing() == ()

    kept = [live, name, value, other, owner, AlwaysEqual, tensor, cell, function, kind]
    kept += [grid, _native.Snapshot]
    for _ in range(3):
        once()
    gc.collect()
    before = [sys.getrefcount(one) for one in kept]
    assert_leaves_nothing(once)
    assert [sys.getrefcount(one) for one in kept] == before


def test_a_snapshot_in_a_cycle_with_its_module_is_collected():
    net = nn.Linear(2, 2)
    net.snapshot = watch(vars(net))
    net.snapshot.accept(0)  # what is recorded holds the snapshot too
    gone = weakref.ref(net.weight)
    del net
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda one: ([one], None),
        lambda one: ({one: 1}, None),
        lambda one: (make_cell(one), None),
        lambda one: (vars(one), one),
        lambda one: ({"a": one}, "a"),
        lambda one: (lambda x=one: x, None),
    ],
    ids=["value", "key", "cell", "owner", "entry", "default"],
)
def test_a_snapshot_in_a_cycle_with_a_member_is_collected(make):
    one = make_class()()
    one.snapshot = _native.Snapshot()
    one.snapshot.add(*make(one))
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
