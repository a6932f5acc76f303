"""Snapshot: which of the objects that it watches have changed."""

import array
import pickle
import subprocess
import sys
from collections import OrderedDict, UserList, deque

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
from torch import nn

LARGE = 1 << 14  # elements: too many to be hashed unasked


class Dict(dict):
    """A subclass with attributes."""


class Ordered(OrderedDict):
    """A subclass with attributes."""


class List(list):
    """A subclass with attributes."""


class Deque(deque):
    """A subclass with attributes."""


def set_cell(cell, value):
    cell.cell_contents = value


# ---- what is a change ---------------------------------------------------------------


MAPPINGS = {kind.__name__: kind for kind in (dict, Dict, OrderedDict, Ordered)}

CHANGES_OF_MAPPINGS = {
    "other value": lambda d: d.update(a=AlwaysEqual()),
    "more": lambda d: d.update(z=d["a"]),
    "less": lambda d: d.pop("b"),
    "empty": lambda d: d.clear(),
    "renamed": lambda d: (d.pop("b"), d.update(z=d["a"])),
    "reordered": lambda d: d.update(a=d.pop("a")),
}


@pytest.mark.parametrize("kind", MAPPINGS.values(), ids=MAPPINGS)
@pytest.mark.parametrize(
    "change", CHANGES_OF_MAPPINGS.values(), ids=CHANGES_OF_MAPPINGS
)
def test_every_kind_of_change_of_a_dictionary_is_seen(kind, change):
    kept = AlwaysEqual()
    live = kind(a=kept, b=kept, c=kept)
    snapshot = watch({}, live)
    assert snapshot.differing() == ()
    change(live)
    assert snapshot.differing() == [1]
    snapshot.accept(1)
    assert snapshot.differing() == ()


@pytest.mark.parametrize("kind", [OrderedDict, Ordered])
def test_a_key_that_is_moved_to_the_end_is_a_change(kind):
    live = kind(a=1, b=2)
    snapshot = watch(live)
    live.move_to_end("a")
    assert snapshot.differing() == [0]
    snapshot.accept(0)
    live.move_to_end("b", last=False)
    assert snapshot.differing() == ()
    live.move_to_end("a", last=False)
    assert snapshot.differing() == [0]


CHANGES = {
    "append": (lambda: [1, 2], lambda v: v.append(3)),
    "item": (lambda: [1, 2, 3], lambda v: v.__setitem__(1, [])),
    "fewer": (lambda: [1, 2, 3], lambda v: v.pop()),
    "all": (lambda: [1, 2], lambda v: v.clear()),
    "order": (lambda: [1, 2], lambda v: v.reverse()),
    "list subclass": (lambda: List([1, 2]), lambda v: v.append(3)),
    "deque": (lambda: deque([1, 2]), lambda v: v.append(3)),
    "turned deque": (lambda: deque([1, 2, 3]), lambda v: v.rotate()),
    "full deque": (lambda: deque([1, 2], 2), lambda v: v.append(3)),
    "deque subclass": (lambda: Deque([1, 2]), lambda v: v.popleft()),
    "set": (lambda: {1}, lambda v: v.add(2)),
    "set subclass": (lambda: Set([1, 2]), lambda v: v.discard(2)),
    "other container": (lambda: UserList([1, 2]), lambda v: v.append(3)),
    "zero": (lambda: [0.0], lambda v: v.__setitem__(0, -0.0)),
    "kind": (lambda: [1], lambda v: v.__setitem__(0, True)),
    "kind of number": (lambda: [1], lambda v: v.__setitem__(0, 1.0)),
    "cell": (lambda: make_cell(1), lambda v: set_cell(v, 2)),
    "cell that is emptied": (lambda: make_cell(1), lambda v: delattr(v, CONTENTS)),
    "code": (
        make_function,
        lambda v: setattr(v, "__code__", (lambda x, *, y: 0).__code__),
    ),
    "defaults": (make_function, lambda v: setattr(v, "__defaults__", (2,))),
    "no defaults": (make_function, lambda v: setattr(v, "__defaults__", None)),
    "keywords": (make_function, lambda v: setattr(v, "__kwdefaults__", {"y": 3})),
    "class attribute": (make_class, lambda v: setattr(v, "value", 2)),
    "new in a class": (make_class, lambda v: setattr(v, "__len__", lambda _: 1)),
    "gone from a class": (make_class, lambda v: delattr(v, "value")),
    "tensor": (lambda: torch.ones(3), lambda v: v.add_(1)),
    "data": (lambda: torch.ones(3), lambda v: v.data.add_(1)),
    "large tensor": (lambda: torch.ones(LARGE), lambda v: v[-1:].add_(1)),
    "other data": (
        lambda: torch.ones(3),
        lambda v: setattr(v, "data", torch.ones(4)),
    ),
    "as numpy": (lambda: torch.ones(3), lambda v: v.numpy().fill(7)),
    "parameter": (
        lambda: nn.Parameter(torch.ones(3)),
        lambda v: v.data.__setitem__(1, -0.0),
    ),
    "turned tensor": (lambda: torch.arange(6).view(2, 3), lambda v: v.t_()),
    "bytes": (lambda: bytearray(3), lambda v: v.__setitem__(1, 7)),
    "array": (lambda: array.array("d", [1]), lambda v: v.append(2)),
    "numpy": (lambda: np.zeros((2, 3)), lambda v: v.__setitem__((1, 1), -0.0)),
    "numpy scalar": (lambda: np.zeros(()), lambda v: v.fill(1)),
}

CONTENTS = "cell_contents"


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_until_it_is_accepted(make, change):
    live = make()
    snapshot = watch({}, live)
    assert snapshot.differing() == ()
    change(live)
    assert snapshot.differing() == [1]
    assert snapshot.differing() == [1]
    snapshot.accept(1)
    assert snapshot.differing() == ()


def test_defaults_that_are_changed_in_place_belong_to_their_dictionary():
    live = make_function()
    snapshot = watch(live, live.__kwdefaults__)
    live.__kwdefaults__["y"] = 3
    assert snapshot.differing() == [1]


def test_several_changes_are_found_at_once_and_accepted_one_by_one():
    dicts = [{"a": 1, "b": None}, {}, {"c": []}]
    snapshot = watch(*dicts)
    dicts[2]["c"] = []
    dicts[0]["b"] = 0
    assert snapshot.differing() == [0, 2]
    snapshot.accept(0)
    assert snapshot.differing() == [2]
    snapshot.accept(2)
    assert snapshot.differing() == ()
    dicts[1]["new"] = 1
    assert snapshot.differing() == [1]


def test_a_snapshot_of_nothing_never_differs():
    assert _native.Snapshot().differing() == ()


def test_the_attributes_of_a_module_are_followed():
    net = nn.Linear(2, 2)
    snapshot = watch(vars(net), net._parameters)
    net.eval()
    assert snapshot.differing() == [0]
    net.bias = None
    assert snapshot.differing() == [0, 1]


def test_attributes_that_hot_code_assigns_are_seen():
    class Counter:
        def __init__(self):
            self.count = 0

        def step(self):
            self.count += 1000

    counter = Counter()
    for _ in range(100):  # until the interpreter has specialised it
        counter.step()
    snapshot = _native.Snapshot()
    at = snapshot.add(vars(counter), counter)
    for _ in range(1000):
        counter.step()
        assert snapshot.differing() == [at]
        snapshot.accept(at)
        assert snapshot.differing() == ()


def test_an_owner_of_another_class_is_a_change():
    class One:
        pass

    class Two:
        pass

    owner = One()
    snapshot = _native.Snapshot()
    at = snapshot.add(vars(owner), owner)
    assert snapshot.differing() == ()
    owner.__class__ = Two
    assert snapshot.differing() == [at]
    snapshot.accept(at)
    assert snapshot.differing() == ()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_an_entry_is_watched_alone(kind):
    live = kind(a=1, b=2)
    snapshot = _native.Snapshot()
    names = ("a", "b", "none")
    assert [snapshot.add(live, name) for name in names] == [0, 1, 2]
    live["other"] = 3
    live["a"] = live.pop("a")  # at another place, but the same
    assert snapshot.differing() == ()
    live["a"] = []
    live["none"] = None  # which is not the same as none
    del live["b"]
    assert snapshot.differing() == [0, 1, 2]
    for at in range(3):
        snapshot.accept(at)
    assert snapshot.differing() == ()
    live["b"] = 2
    del live["none"]
    assert snapshot.differing() == [1, 2]


def test_what_comes_into_a_set_and_goes_is_seen():
    live = set(range(0, 900, 3))
    snapshot = watch(live)
    for change in (live.add, live.discard, live.add, live.discard):
        change(4)
        assert snapshot.differing() == [0]
        snapshot.accept(0)
        assert snapshot.differing() == ()


def test_a_set_is_asked_in_its_own_order_whatever_a_subclass_iterates_over():
    class Sorted(set):
        def __iter__(self):
            return iter(())

    live = Sorted([1, 2])
    snapshot = watch(live)
    live.add(3)
    assert snapshot.differing() == [0]


# ---- tensors and arrays -------------------------------------------------------------


def test_a_large_tensor_is_hashed_only_if_asked():
    values = torch.zeros(LARGE)
    snapshot = _native.Snapshot()
    assert [snapshot.add(values), snapshot.add(values, whole=True)] == [0, 1]
    values.data[-1] = 1  # no version is moved
    assert snapshot.differing() == [1]
    snapshot.accept(1)
    assert snapshot.differing() == ()
    values.data[LARGE // 2] = 1  # to accept keeps what was asked
    assert snapshot.differing() == [1]
    values.add_(1)
    assert snapshot.differing() == [0, 1]


@pytest.mark.parametrize("n", [3, LARGE])
def test_tensors_of_inference_mode_are_compared_by_their_bytes(n):
    with torch.inference_mode():
        values = torch.zeros(n)
        snapshot = watch(values)
        assert snapshot.differing() == ()
        values[-1] = 1
        assert snapshot.differing() == [0]
        snapshot.accept(0)
        assert snapshot.differing() == ()


@pytest.mark.parametrize(
    "make",
    [lambda: torch.eye(3).to_sparse(), lambda: torch.zeros(3, device="meta")],
    ids=["sparse", "meta"],
)
def test_tensors_that_cannot_be_hashed_go_by_their_version(make):
    values = make()
    snapshot = _native.Snapshot()
    assert snapshot.add(values, whole=True) == 0
    assert snapshot.differing() == ()
    values.zero_() if values.layout == torch.strided else values.mul_(2)
    assert snapshot.differing() == [0]


def test_arrays_with_gaps_are_read_and_their_gaps_are_not():
    grid = np.zeros((4, 6))
    snapshot = watch(grid[:, ::2], grid.T, grid[1:3, 1:])
    assert snapshot.differing() == ()
    grid[1, 1] = 1  # in a gap of the first
    assert snapshot.differing() == [1, 2]
    snapshot.accept(1)
    snapshot.accept(2)
    grid[3, 4] = 1
    assert snapshot.differing() == [0, 1]


def test_an_array_without_elements_never_differs():
    snapshot = watch(np.zeros((0, 3)), bytearray(), np.zeros((3, 0))[::2])
    assert snapshot.differing() == ()


def make_inference_view():
    """Return every other column of a matrix of inference mode: it has no version."""
    with torch.inference_mode():
        return torch.zeros(4, 6)[:, ::2]


def set_data(make):
    return lambda v: setattr(v, "data", make(v.data))


CHANGES_OF_FORM = {
    "shape of a tensor": (
        lambda: torch.arange(6.0),
        set_data(lambda d: d.view(2, 3)),
    ),
    "strides of a tensor": (
        lambda: torch.ones(2, 3),
        set_data(lambda d: d.as_strided((2, 3), (1, 2))),
    ),
    "dtype of a tensor": (
        lambda: torch.ones(4),
        set_data(lambda d: d.view(torch.int32)),
    ),
    "truths as bytes": (
        lambda: torch.ones(4, dtype=torch.bool),
        set_data(lambda d: d.view(torch.uint8)),
    ),
    "dtype of a tensor that is not hashed": (
        lambda: torch.ones(4).to(torch.float8_e4m3fn),
        set_data(lambda d: d.view(torch.float8_e5m2)),
    ),
    "shape of a tensor without memory": (
        lambda: torch.ones(4, device="meta"),
        set_data(lambda d: d.view(2, 2)),
    ),
    "conjugate": (lambda: torch.tensor([1j]), set_data(lambda d: d.conj())),
    "negative": (
        lambda: torch.tensor([1j, 2j]).imag,
        set_data(lambda d: torch._neg_view(d)),
    ),
    "a gradient wanted": (lambda: torch.ones(4), lambda v: v.requires_grad_(True)),
    "data with gaps": (
        lambda: torch.zeros(4, 6)[:, ::2],
        lambda v: v.data.__setitem__((3, 2), 1),
    ),
    "data with gaps of inference mode": (
        make_inference_view,
        torch.inference_mode()(lambda v: v.__setitem__((3, 2), 1)),
    ),
    "expanded data": (
        lambda: torch.zeros(1, 2).expand(1 << 40, 2),
        lambda v: v.data.__setitem__((0, 1), 1),
    ),
    "overlapping data": (
        lambda: torch.zeros(5).unfold(0, 3, 1),
        lambda v: v.data.__setitem__((2, 2), 1),
    ),
    "shape of an array": (
        lambda: np.arange(6.0),
        lambda v: setattr(v, "shape", (2, 3)),
    ),
    "strides of an array": (
        lambda: np.ones((3, 3)),
        lambda v: setattr(v, "strides", v.strides[::-1]),
    ),
    "dtype of an array": (
        lambda: np.arange(6.0),
        lambda v: setattr(v, "dtype", np.int64),
    ),
    "unit of an array": (
        lambda: np.arange(6).astype("M8[s]"),
        lambda v: setattr(v, "dtype", "M8[ms]"),
    ),
}


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype|strides)")
@pytest.mark.parametrize(
    ("make", "change"), CHANGES_OF_FORM.values(), ids=CHANGES_OF_FORM
)
def test_a_change_of_form_over_the_same_bytes_is_seen(make, change):
    live = make()
    snapshot = _native.Snapshot()
    snapshot.add(live, whole=True)
    assert snapshot.differing() == ()
    change(live)
    assert snapshot.differing() == [0]
    snapshot.accept(0)
    assert snapshot.differing() == ()


def test_the_gaps_of_a_tensor_are_not_read():
    values = torch.zeros(4, 6)
    snapshot = _native.Snapshot()
    snapshot.add(values.T[::2], whole=True)
    values.data[:, 1::2] = 1  # its version is that of the view, and is not moved
    assert snapshot.differing() == ()
    values.data[3, 4] = 1
    assert snapshot.differing() == [0]


def test_the_form_of_a_large_tensor_counts_though_its_content_does_not():
    values = torch.zeros(LARGE)
    snapshot = watch(values)
    values.data[0] = 1
    assert snapshot.differing() == ()
    values.data = values.data.view(2, -1)
    assert snapshot.differing() == [0]


def test_other_bases_of_a_class_are_a_change():
    heir = type("Heir", (make_class(),), {})
    snapshot = watch(heir)
    heir.__bases__ = (make_class(),)
    assert snapshot.differing() == [0]


def test_the_own_order_of_an_ordered_dictionary_may_hold_what_it_has_not():
    code = """
from collections import OrderedDict
from paceline import _native

class Odd(OrderedDict):
    def __iter__(self):
        return iter([*super().__iter__(), "not there"])

live = Odd(a=1)
snapshot = _native.Snapshot()
snapshot.add(live)
dict.__setitem__(live, "not there", 2)
snapshot.differing()
snapshot.delta(0)
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=120)
    assert result.returncode == 0


# ---- what is none -------------------------------------------------------------------


def test_members_are_compared_by_identity_and_nothing_is_called():
    key = Loud()
    lives = [
        {key: Loud()},
        [Loud()],
        deque([Loud()]),
        make_cell(Loud()),
        OrderedDict(a=Loud()),
        {"a": Loud()},
    ]
    snapshot = watch(*lives[:-1])
    entry = snapshot.add(lives[-1], "a")
    assert snapshot.differing() == ()
    lives[0][key] = Loud()
    lives[1][0] = Loud()
    lives[2][0] = Loud()
    lives[3].cell_contents = Loud()
    lives[4]["a"] = Loud()
    lives[5]["a"] = Loud()
    assert snapshot.differing() == [0, 1, 2, 3, 4, entry]


def test_values_are_not_looked_into():
    inner = [1]
    snapshot = watch({"inner": inner}, [inner], {1: inner})
    inner.append(2)
    assert snapshot.differing() == ()


def test_a_value_that_comes_back_is_no_difference():
    value = Loud()
    live = {"a": 1, "b": value}
    snapshot = watch(live)
    live["b"] = 3
    assert snapshot.differing() == [0]
    live["b"] = value
    assert snapshot.differing() == ()


@pytest.mark.parametrize(
    "value", [10**20, -(10**5), 2.5, float("nan"), -0.0, "some words"]
)
def test_a_number_or_a_string_of_the_same_value_is_no_difference(value):
    lives = [[value], {"a": value}, deque([value]), make_cell(value), {"a": value}]
    snapshot = watch(*lives[:-1])
    snapshot.add(lives[-1], "a")
    again = pickle.loads(pickle.dumps(value))
    assert again is not value
    lives[0][0] = lives[1]["a"] = lives[2][0] = lives[4]["a"] = again
    lives[3].cell_contents = again
    assert snapshot.differing() == ()


class Number(int):
    pass


class Word(str):
    __slots__ = ("tag",)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (Number(7), Number(7)),
        (Word("a"), Word("a")),
        ("a", Word("a")),
        (1.5, 1.5 + 2**-50),
        (float("nan"), -float("nan")),
    ],
)
def test_what_is_equal_but_not_the_same_is_a_difference(value, other):
    live = [value]
    snapshot = watch(live)
    live[0] = other
    assert snapshot.differing() == [0]
