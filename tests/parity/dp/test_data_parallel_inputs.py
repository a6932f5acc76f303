"""What goes in: every kind of argument arrives at the replicas as users wrote it."""

import collections
import dataclasses
import fractions
import functools
import math
import pathlib
from typing import NamedTuple

import numpy as np
import paceline
import pytest
import torch
from replicas import Twin, alike, integer_weights, integers, loss_of, net
from torch import nn
from torch.utils import _pytree as pytree

# ---- how a batch is divided ---------------------------------------------------------


class Census(nn.Module):
    """Says how many rows it was given."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, x=None):
        if x is None:
            return self.linear.weight.sum(), 0
        return self.linear(x), len(x)


@pytest.mark.parametrize(
    ("n", "n_rows", "seen"),
    [
        (2, 7, [4, 3]),
        (3, 7, [3, 2, 2]),
        (3, 2, [1, 1]),
        (2, 6, [3, 3]),
        (2, 1, [1]),
        (3, 0, [0]),
    ],
)
def test_rows_are_dealt_out_evenly(wrap, n, n_rows, seen):
    ours = wrap(Census(), n)
    for _ in range(2):  # whatever the first forward finds out
        out, rows = ours(integers(n_rows, 3))
        assert out.shape == (n_rows, 2)
        assert rows == seen


def test_no_argument_at_all_is_one_call(wrap):
    total, rows = wrap(Census())()
    assert total.shape == (1,)
    assert rows == [0]


@pytest.mark.parametrize(
    ("n", "n_rows"), [(2, 7), (2, 8), (3, 7), (3, 3), (3, 2), (2, 1), (3, 1), (2, 0)]
)
def test_any_number_of_rows_gives_the_plain_gradients(wrap, n, n_rows):
    twin = Twin(wrap, net(), n)
    twin.compare(lambda model, x: model(x), integers(n_rows, 3))
    twin.step(lambda model, x: loss_of(model(x)), integers(n_rows, 3).requires_grad_())


def test_batches_may_shrink_and_grow_from_step_to_step(wrap):
    twin = Twin(wrap, net(), 3)
    for n_rows in (9, 2, 1, 0, 7, 64, 3):
        twin.zero()
        x = integers(n_rows, 3, seed=n_rows)
        twin.step(lambda model, x: loss_of(model(x)), x)


def test_batches_of_many_megabytes_pass(wrap):
    twin = Twin(wrap, net())
    for n_rows in (7, 300_001, 1, 100_000):
        twin.zero()
        x = integers(n_rows, 3, seed=n_rows).requires_grad_()
        twin.step(lambda model, x: model(x).sum(), x)


@pytest.mark.parametrize("dim", [1, -2])
def test_rows_may_lie_along_another_dimension(wrap, dim):
    twin = Twin(wrap, net(), dim=dim)
    x = integers(5, 7, 3).requires_grad_()
    twin.compare(lambda model, x: model(x), x)
    twin.step(lambda model, x: loss_of(model(x)), x)


def test_the_function_does_what_the_class_does():
    x = integers(7, 3)
    plain, module = net(), net()
    loss_of(plain(x)).backward()
    out = paceline.data_parallel(module, x, device_ids=["cpu"] * 2)
    loss_of(out).backward()
    assert torch.equal(out, plain(x))
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


# ---- several arguments --------------------------------------------------------------


class Sum(nn.Module):
    """Takes two inputs, and options of every plain kind."""

    def __init__(self):
        super().__init__()
        self.left = integer_weights(nn.Linear(3, 2), 1)
        self.right = integer_weights(nn.Linear(4, 2, bias=False), 2)

    def forward(self, x, y=None, scale=1, *, sign="plus", mask=None, shift=0.0):
        out = self.left(x) * scale + float(shift)
        if y is not None:
            out = out + self.right(y) if sign == "plus" else out - self.right(y)
        if mask is not None:
            out = out.masked_fill(mask, 0)
        return out


CALLS = {
    "positional": lambda m, x, y: m(x, y),
    "keywords only": lambda m, x, y: m(x=x, y=y),
    "both": lambda m, x, y: m(x, y=y),
    "keywords in another order": lambda m, x, y: m(y=y, sign="minus", x=x),
    "numbers": lambda m, x, y: m(x, y, 2, shift=3.0),
    "a string": lambda m, x, y: m(x, y, sign="minus"),
    "None": lambda m, x, y: m(x, None, 3, mask=None),
    "a mask": lambda m, x, y: m(x, y, mask=x[:, :1] > 0),
    "0-dim tensor": lambda m, x, y: m(x, y, torch.tensor(2.0, dtype=torch.float64)),
    "0-dim array": lambda m, x, y: m(x, y, shift=np.array(2.0)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arguments_of_a_call_arrive(wrap, call):
    twin = Twin(wrap, Sum())
    x, y = integers(7, 3).requires_grad_(), integers(7, 4).requires_grad_()
    twin.step(lambda model, x, y: loss_of(call(model, x, y)), x, y)


def test_options_may_change_from_call_to_call(wrap):
    twin = Twin(wrap, Sum())
    x, y = integers(7, 3), integers(7, 4)
    for options in ({}, {"scale": 2}, {"sign": "minus"}, {"scale": 2}, {"shift": 1.0}):
        twin.compare(lambda m, x, y, options=options: m(x, y, **options), x, y)


# ---- nested arguments ---------------------------------------------------------------


class Point(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass
class Record:
    a: torch.Tensor
    b: torch.Tensor
    note: str = "none"


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    a: torch.Tensor
    b: torch.Tensor


class Pair:
    """A container that torch knows by registration alone."""

    def __init__(self, a, b, note):
        self.a, self.b, self.note = a, b, note


pytree.register_pytree_node(
    Pair,
    lambda pair: ([pair.a, pair.b], pair.note),
    lambda leaves, note: Pair(*leaves, note),
    serialized_type_name="test_data_parallel_inputs.Pair",
)

# name: (makes the nesting of two tensors, finds them in it)
NESTINGS = {
    "tuple": (lambda a, b: (a, b), lambda v: v),
    "list": (lambda a, b: [a, "skipped", b], lambda v: (v[0], v[2])),
    "dict": (lambda a, b: {"b": b, "a": a}, lambda v: (v["a"], v["b"])),
    "ordered dict": (
        lambda a, b: collections.OrderedDict(b=b, a=a),
        lambda v: (v["a"], v["b"]),
    ),
    "dict of integers": (lambda a, b: {1: a, 2: b, 3: None}, lambda v: (v[1], v[2])),
    "namedtuple": (Point, lambda v: (v.a, v.b)),
    "dataclass": (lambda a, b: Record(a, b, "kept"), lambda v: (v.a, v.b)),
    "frozen dataclass": (FrozenRecord, lambda v: (v.a, v.b)),
    "registered": (lambda a, b: Pair(a, b, "kept"), lambda v: (v.a, v.b)),
    "deep": (
        lambda a, b: {"x": [((a,), {"y": Point(a, [Record(b, b)])})], "z": ()},
        lambda v: (v["x"][0][0][0], v["x"][0][1]["y"].b[0].b),
    ),
    "the same tensor twice": (lambda a, b: [a, a, b], lambda v: (v[0] + v[1], v[2])),
}


class Nested(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.left = integer_weights(nn.Linear(3, 2), 1)
        self.right = integer_weights(nn.Linear(4, 2), 2)

    def forward(self, batch):
        a, b = NESTINGS[self.kind][1](batch)
        note = getattr(batch, "note", None)
        return self.left(a) - self.right(b), type(batch).__name__, note, len(a)


@pytest.mark.parametrize("kind", NESTINGS)
def test_nested_arguments_keep_their_form(wrap, kind):
    make = NESTINGS[kind][0]
    twin = Twin(wrap, Nested(kind))
    a, b = integers(7, 3).requires_grad_(), integers(7, 4).requires_grad_()
    twin.step(lambda model, a, b: loss_of(model(make(a, b))[0]), a, b)
    _, name, note, rows = twin.ours(make(a, b))
    assert name == [type(make(a, b)).__name__] * 2
    assert alike(note) == getattr(make(a, b), "note", None)
    assert rows == [4, 3]


def test_sizes_that_disagree_are_one_error_with_both(wrap):
    ours = wrap(Sum())
    with pytest.raises(ValueError, match=r"\b7\b.*\b5\b|\b5\b.*\b7\b") as caught:
        ours(integers(7, 3), integers(5, 4))
    assert "replicate" in str(caught.value)
    assert ours(integers(7, 3), integers(7, 4)).shape == (7, 2)


# ---- objects of any kind ------------------------------------------------------------


class Settings:
    """Something of the user's own, which he may change between calls."""

    def __init__(self, power):
        self.power = power

    def __repr__(self):
        return f"Settings({self.power})"


def double(x):
    return 2 * x


THINGS = {
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size([1, 2]),
    "slice": lambda: slice(0, 2),
    "range": lambda: range(3),
    "set": lambda: {1},
    "fraction": lambda: fractions.Fraction(1, 3),
    "path": lambda: pathlib.PurePosixPath("a/b"),
    "type": lambda: Settings,
    "object": lambda: Settings(2),
    "objects inside": lambda: [{"a": Settings(2)}, (Settings(3), ...)],
    "dict without tensors": lambda: {"a": [1, "b"], 2: None},
    "infinity": lambda: (math.inf, -0.0),
}


class Describe(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, x, thing):
        if callable(thing) and not isinstance(thing, type):
            return self.linear(thing(x)), "called"
        return self.linear(x), repr(thing)


@pytest.mark.parametrize("make", THINGS.values(), ids=THINGS)
def test_objects_of_any_kind_are_given_to_each(wrap, make):
    twin = Twin(wrap, Describe())
    for _ in range(2):
        twin.compare(lambda model, x: model(x, make()), integers(7, 3))
    twin.step(lambda model, x: loss_of(model(x, make())[0]), integers(7, 3))


def test_functions_are_given_to_each(wrap):
    twin = Twin(wrap, Describe())
    for factor in (2, 3, 2):
        for thing in (double, lambda x, f=factor: x * f, functools.partial(double)):
            twin.compare(lambda model, x, f=thing: model(x, f), integers(7, 3))


def test_an_object_changed_between_calls_is_given_anew(wrap):
    ours, settings = wrap(Describe()), Settings(1)
    for power in (1, 2, 3):
        settings.power = power
        assert ours(integers(7, 3), settings)[1] == [f"Settings({power})"] * 2


# ---- arguments that are not to be split ---------------------------------------------


class Table(nn.Module):
    """Looks rows up in a table that all rows share."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, index, tables):
        table = tables["table"] if isinstance(tables, dict) else tables
        return self.linear(table[index]), len(table)


@pytest.mark.parametrize("form", ["tensor", "inside a dict", "whole dict"])
def test_a_replicated_argument_goes_whole_to_each(wrap, form):
    plain, module = Table(), Table()
    ours = wrap(module, 3)
    index = torch.tensor([4, 0, 1, 1, 3, 4, 4])
    tables = [integers(5, 3).requires_grad_() for _ in range(2)]
    loss_of(plain(index, tables[0])[0]).backward()
    if form == "tensor":
        out, rows = ours(index, paceline.replicate(tables[1]))
    elif form == "inside a dict":
        out, rows = ours(index, {"table": paceline.replicate(tables[1])})
    else:
        out, rows = ours(index, paceline.replicate({"table": tables[1]}))
    assert rows == [5] * 3
    loss_of(out).backward()
    assert torch.equal(tables[1].grad, tables[0].grad)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class WritesTheFirst(nn.Module):
    """Writes into its first argument, and returns the second."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 3))

    def forward(self, written, read):
        written.zero_()
        return read + self.linear(written)


def test_one_tensor_as_two_arguments_is_two_elsewhere(wrap):
    x, ours = integers(5, 3), wrap(WritesTheFirst(), 2)
    ours(x, x.clone())  # whatever the first forward finds out
    before = x.fill_(7).clone()
    is_zeroed = torch.arange(5) < (3 if wrap.is_gpu else 5)
    after = torch.where(is_zeroed[:, None], 0.0, before)
    assert torch.equal(ours(x, x), ours.module(after[:1] * 0, after))
    assert torch.equal(x, after)
