"""What makes a model another one, and what nobody can send or watch."""

import collections
import dataclasses
import datetime
import enum
import functools
import io
import itertools
import operator
import pathlib
import random
import struct
import threading
import types

import numpy as np
import pytest
import torch
from model_states import (
    Follower,
    Model,
    Opaque,
    forward,
    share,
)
from paceline._dp.process.watchable import watchable
from paceline._replicas.errors import UnsupportedModelError
from torch import nn
from torch.nn.utils import parametrizations

# ---- what nobody can send or watch --------------------------------------------------


class Buffer(io.BytesIO):
    pass


class Array(np.ndarray):
    pass


UNWATCHED = {
    "generator": (torch.Generator, "random generator .*Generator"),
    "random": (random.Random, "random generator .*Random"),
    "numpy": (lambda: np.random.default_rng(1), "random generator .*Generator"),
    "iterator": (itertools.count, r"itertools\.count, of which nobody can tell"),
    "cycle": (lambda: itertools.cycle([1]), r"itertools\.cycle, of which nobody"),
    "lock": (threading.Lock, "lock"),
    "in a list": (lambda: [{"a": itertools.count()}], r"itertools\.count"),
    "running": (lambda: (x for x in ()), "generator"),
    "trained": (lambda: torch.ones(2, requires_grad=True), "requires a gradient"),
    "objects": (lambda: np.array([[1], {}], dtype=object), "ndarray, of which nobody"),
    "file": (io.BytesIO, r"BytesIO, of which nobody"),
    "subclass": (lambda: Buffer(b"a"), r"Buffer, of which nobody"),
    "array of a subclass": (
        lambda: np.array([[1], {}], dtype=object).view(Array),
        "Array, of which nobody",
    ),
}


@pytest.mark.parametrize(("make", "words"), UNWATCHED.values(), ids=UNWATCHED)
def test_what_cannot_travel_says_why_at_first_and_later(make, words):
    with pytest.raises(UnsupportedModelError, match=words):
        share(Opaque(make()))
    model = share(Opaque(None))
    model.module.held = make()
    with pytest.raises(UnsupportedModelError, match=words):
        model.changes()
    assert model.changes() is None  # the model is shared anew, which says it again


class Counted(collections.Counter):
    pass


SHOWN = {
    "mapping": lambda: types.MappingProxyType({1: [2]}),
    "dataclass": lambda: dataclasses.make_dataclass("Some", ["field"])([1]),
    "namespace": lambda: types.SimpleNamespace(a=1),
    "counter": lambda: Counted("abca"),
    "ordered": lambda: collections.OrderedDict(a=1),
    "enumeration": lambda: enum.Enum("Kind", "A B").A,
    "error": lambda: ValueError("a"),
    "named": lambda: collections.namedtuple("Named", "a b")(1, [2]),
    "path": lambda: pathlib.Path("a"),
    "date": lambda: datetime.date(2000, 1, 1),
    "partial": lambda: functools.partial(max, 1),
    "record": lambda: np.zeros(2, dtype=[("a", "f4")]),
}


@pytest.mark.parametrize("make", SHOWN.values(), ids=SHOWN)
def test_what_hides_nothing_is_watched(make):
    watchable(make())


CONSTANT = [operator.itemgetter(1), operator.attrgetter("a"), struct.Struct("i")]


@pytest.mark.parametrize("value", CONSTANT, ids=lambda value: type(value).__name__)
def test_what_never_changes_needs_no_watching(value):
    assert watchable(value) == []


# ---- what makes it another model ----------------------------------------------------


ANOTHER = {
    "a parameter": lambda m: setattr(m.layer, "bias", nn.Parameter(torch.ones(2))),
    "a part": lambda m: setattr(m, "layer", nn.Linear(2, 2)),
    "one more part": lambda m: m.add_module("more", nn.Linear(2, 2)),
    "one part less": lambda m: delattr(m, "layer"),
    "one more buffer": lambda m: m.register_buffer("more", torch.zeros(1)),
    "no buffer": lambda m: setattr(m, "count", None),
    "a larger buffer": lambda m: setattr(m, "count", torch.zeros(3)),
    "a class": lambda m: setattr(m, "__class__", type("Other", (Model,), {})),
    "another dictionary": lambda m: setattr(m, "_buffers", dict(m._buffers)),
}


@pytest.mark.parametrize("change", ANOTHER.values(), ids=ANOTHER)
def test_a_model_of_another_structure_is_sent_anew(shared, change):
    change(shared.module)
    assert shared.changes() is None


SCRIPT = """
factor = 3
table = {"gain": 1}
plus = [1]

def make(cell, step=1, *, width=1):
    def scale(x, base=1, *, power=1):
        return x * factor + table["gain"] + cell[0] + plus[0] + base + power
    return scale

class Base(nn.Module):
    bonus = 1

class Script(Base):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.cell = [5]
        self.scale = make(self.cell)
        self.other = make

    def forward(self, x):
        return self.scale(x) + factor + self.bonus
"""


def make_script():
    scope = {"__name__": "__main__", "nn": nn, "torch": torch}
    exec(SCRIPT, scope)
    return scope["Script"](), scope


CODE = {
    "a global": lambda net, scope: scope.update(factor=4),
    "a global that goes": lambda net, scope: scope.pop("factor"),
    "a dict that is a global": lambda net, scope: scope["table"].update(gain=2),
    "a list that is a global": lambda net, scope: scope["plus"].append(2),
    "code": lambda net, scope: setattr(net.scale, "__code__", make_code()),
    "defaults": lambda net, scope: setattr(net.scale, "__defaults__", (2,)),
    "keywords": lambda net, scope: setattr(net.scale, "__kwdefaults__", {"power": 2}),
    "a keyword": lambda net, scope: net.scale.__kwdefaults__.update(power=2),
    "a cell": lambda net, scope: setattr(cell_of(net.scale), "cell_contents", [6]),
    "a class": lambda net, scope: setattr(scope["Script"], "forward", print),
    "a base": lambda net, scope: setattr(scope["Base"], "bonus", 2),
    "new in a class": lambda net, scope: setattr(scope["Script"], "new", 1),
}


def cell_of(function):
    return function.__closure__[0]


def make_code():
    def read(cell):
        def scale(x, base=1, *, power=1):
            return x + cell[0]

        return scale

    return read([1]).__code__


@pytest.mark.parametrize("change", CODE.values(), ids=CODE)
def test_code_of_a_script_that_has_changed_is_sent_with_the_model_anew(change):
    net, scope = make_script()
    model = share(net)
    assert model.changes() == {}
    change(net, scope)
    assert model.changes() is None


def test_a_script_arrives_with_its_globals_and_cells():
    net, _ = make_script()
    follower = Follower(share(net))
    x = torch.ones(1)
    assert follower.net(x).tolist() == net(x).tolist()
    assert cell_of(follower.net.scale).cell_contents is follower.net.cell
    assert follower.net.scale.__globals__ is not net.scale.__globals__
    assert follower.net.scale.__globals__ is follower.net.other.__globals__


def test_a_model_is_sent_anew_over_the_same_memory(shared):
    net = shared.module
    places = [p.data_ptr() for p in net.parameters()]
    net.__class__ = type("Heir", (Model,), {})
    assert shared.changes() is None
    again = share(net, shared)
    assert again.keeps_memory
    assert again.memory is shared.memory
    assert [p.data_ptr() for p in net.parameters()] == places
    assert again.changes() == {}
    net.layer = nn.Linear(2, 2)
    assert not share(net, again).keeps_memory


def test_buffers_with_gaps_or_repeats_stay_in_the_same_memory():
    net = nn.Linear(1, 1)
    net.register_buffer("repeated", torch.ones(1).expand(3))
    net.register_buffer("spread", torch.arange(6.0)[::2])
    model = share(net)
    again = share(net, model)
    assert again.keeps_memory
    assert again.memory is model.memory
    net.spread = torch.arange(8.0)[::2]
    assert not share(net, again).keeps_memory


# ---- buffers ------------------------------------------------------------------------


def test_a_buffer_may_be_replaced_by_one_of_its_layout(shared):
    for value in (1.0, 2.0, 3.0):
        shared.module.count = torch.full((2,), value)
        assert shared.changes() == {}
        assert shared.memory.buffer_views[0].tolist() == [value, value]


def test_a_buffer_that_an_attribute_shares_stays_one_when_it_is_replaced():
    net = Model()
    net.seen = [net.count]
    follower = Follower(share(net))
    assert follower.net.seen[0] is follower.net.count
    net.count = torch.ones(2)
    net.seen = [net.count]
    assert follower.follow() == ["seen"]
    assert follower.net.seen[0] is follower.net.count


def test_two_names_of_one_buffer_that_part_make_another_model():
    net = Model()
    net.register_buffer("also", net.count)
    model = share(net)
    assert model.changes() == {}
    net.count = torch.ones(2)
    assert model.changes() is None


def test_a_buffer_that_forward_replaces_is_not_sent(shared):
    for _ in range(3):
        forward(shared, lambda net: setattr(net, "count", net.count + 1))
        assert shared.changes() == {}
    assert shared.memory.buffer_views[0].tolist() == [3, 3]


# ---- parts with a pickle of their own -----------------------------------------------


def traced():
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


OWN = {
    "lstm": (lambda: nn.LSTM(2, 2, 2), torch.ones(3, 1, 2)),
    "gru": (lambda: nn.GRU(2, 3), torch.ones(3, 1, 2)),
    "attention": (
        lambda: Attending(nn.MultiheadAttention(2, 1)),
        torch.ones(3, 1, 2),
    ),
    "weight norm": (
        lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
        torch.ones(3, 2),
    ),
    "spectral norm": (
        lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
        torch.ones(3, 2),
    ),
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
        torch.ones(3, 2),
    ),
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(2, 2)),
        torch.ones(3, 2),
    ),
}


class Attending(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*")
@pytest.mark.parametrize(("make", "x"), OWN.values(), ids=OWN)
@pytest.mark.parametrize("is_inside", [False, True], ids=["alone", "as a part"])
def test_parts_with_a_pickle_of_their_own_arrive_whole(make, x, is_inside):
    net = nn.Sequential(make(), nn.Identity()) if is_inside else make()
    model = share(net)
    assert model.changes() == {}
    follower = Follower(model)
    ours, theirs = net(x), follower.net(x)
    ours, theirs = (y[0] if isinstance(y, tuple) else y for y in (ours, theirs))
    assert torch.equal(ours, theirs)
    assert [*follower.net.state_dict()] == [*net.state_dict()]
    forward(model, lambda net: net(x))
    assert model.changes() == {}
    net.eval()
    net.train()
    assert model.changes() == {}
    net.eval()
    assert follower.follow()
    assert not any(part.training for part in follower.net.modules())
    assert model.changes() == {}


def test_a_traced_graph_arrives_whole():
    net, x = traced(), torch.ones(3, 2)
    follower = Follower(share(net))
    assert torch.equal(follower.net(x), net(x))
    assert follower.net.code == net.code


def test_a_traced_graph_that_has_not_changed_is_not_sent_again():
    model = share(traced())
    assert model.changes() == {}
