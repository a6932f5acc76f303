"""A module's plain state as its replicas follow it, on both sides, in one process."""

import collections
import dataclasses
import datetime
import enum
import functools
import gc
import io
import itertools
import operator
import pathlib
import pickle
import random
import struct
import threading
import types
import weakref
from array import array
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from natives import torch_core  # hands torch to the native module
from paceline import _native
from paceline._dp.process import imports, pickling, snapshot, snapshot_load
from paceline._dp.process.outbox import Outbox
from paceline._dp.process.shared_model import SharedModel
from paceline._dp.process.watchable import watchable
from paceline._replicas.errors import CannotTravelError
from torch import nn
from torch.nn.utils import parametrizations

assert torch_core


class Node:
    """Holds itself."""

    def __init__(self):
        self.circle = [self]
        self.tensor = torch.zeros(4)


class Slotted:
    """Has no dictionary."""

    __slots__ = ("gain",)

    def __init__(self, gain):
        self.gain = gain


class Model(nn.Module):
    """Has attributes of many kinds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))
        self.rate = 0.5
        self.log = list(range(1000))
        self.options = {"rate": 0.5, "name": "some words", "deep": [{}]}
        self.table = torch.zeros(3)
        self.queue = deque([1, 2], 2)
        self.numbers = array("d", [1, 2])
        self.names = {"a", "b"}
        self.ordered = OrderedDict(a=1, b=2)
        self.slotted = Slotted(1)
        self.pair = ([1], [2])


def share(net, previous=None):
    """Share a module; its replica has imported what this process has."""
    model = SharedModel(net, 1, pickling.ScriptGlobals(), previous)
    model.imported.compare(imports.digests_of(model.imported.entries))
    return model


class Follower:
    """A replica of a shared model, built in this process."""

    def __init__(self, model):
        self.model = model
        self.known = {
            ("parameter", i): nn.Parameter(p.detach().clone(), p.requires_grad)
            for i, p in enumerate(model.module.parameters())
        }
        owners = list(snapshot.owners_of_buffers(model.module))
        self.known.update(
            (("buffer", i), owner[name].clone())
            for i, (owner, name) in enumerate(owners)
        )
        skeleton = model.describe(0).skeleton
        self.net = snapshot_load.load_skeleton(skeleton, self.known)[0]

    def follow(self):
        """Receive what has changed; return the names of the attributes concerned."""
        update = self.model.changes()
        assert update is not None
        payload = update.get("attributes", b"")
        snapshot_load.load_attributes(payload, self.known)
        return names_in(payload, self.known)


def names_in(payload, known):
    """Return the attributes that are in a payload, of the module itself by name."""
    found = [value[:2] for value in pickling.load_stream(payload, known)]
    return sorted(name if i == 0 else f"{i}.{name}" for i, name in found)


@pytest.fixture
def shared():
    return share(Model())


@pytest.fixture
def follower(shared):
    return Follower(shared)


# ---- what is sent -------------------------------------------------------------------


def test_nothing_is_sent_where_nothing_has_changed(shared):
    assert shared.changes() == {}
    shared.state.forget_before()
    shared.forward_ends()
    assert shared.changes() == {}
    with torch.no_grad():
        shared.module.layer.weight.fill_(2)  # it lies in shared memory
    shared.module.count.add_(3)  # copied before each forward
    assert shared.changes() == {}


def test_a_value_that_is_equal_is_no_change(shared):
    net = shared.module
    again = pickle.loads(pickle.dumps({"rate": 0.5, "name": "some words"}))
    net.options.update(again)
    net.rate = again["rate"]
    net.layer.training = bool(1)
    net.table.data.zero_()
    assert shared.changes() == {}


CHANGES = {
    "number": (lambda m: setattr(m, "rate", 0.25), "rate"),
    "list": (lambda m: m.log.append(1), "log"),
    "dict": (lambda m: m.options.update(rate=0.25), "options"),
    "list in a dict": (lambda m: m.options["deep"].append({}), "options"),
    "dict in a list": (lambda m: m.options["deep"][0].update(a=1), "options"),
    "tensor": (lambda m: m.table.add_(1), "table"),
    "by data": (lambda m: m.table.data.add_(1), "table"),
    "other tensor": (lambda m: setattr(m, "table", torch.ones(3)), "table"),
    "deque": (lambda m: m.queue.append(3), "queue"),
    "numbers": (lambda m: m.numbers.append(3), "numbers"),
    "one number": (lambda m: m.numbers.__setitem__(0, 3), "numbers"),
    "set": (lambda m: m.names.add("c"), "names"),
    "order": (lambda m: m.ordered.move_to_end("a"), "ordered"),
    "slot": (lambda m: setattr(m.slotted, "gain", 2), "slotted"),
    "list in a tuple": (lambda m: m.pair[1].append(3), "pair"),
    "new": (lambda m: setattr(m, "new", {}), "new"),
    "mode": (lambda m: m.layer.eval(), "1.training"),
    "of a part": (lambda m: setattr(m.layer, "tag", [1]), "1.tag"),
}


@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_sent_once(follower, change, name):
    change(follower.model.module)
    assert name in follower.follow()
    assert follower.model.changes() == {}
    assert plain_state(follower.net) == plain_state(follower.model.module)


LINKED = ("tensor", "by data", "other tensor", "deque", "order", "slot")
"""Changes of what is pickled with an empty tuple, of which there is only one."""


@pytest.mark.parametrize("what", sorted(CHANGES.keys() - set(LINKED)))
def test_what_shares_nothing_is_sent_alone(follower, what):
    change, name = CHANGES[what]
    change(follower.model.module)
    assert follower.follow() == [name]


@pytest.mark.parametrize("what", LINKED)
def test_what_is_pickled_with_an_empty_tuple_is_sent_alone(follower, what):
    change, name = CHANGES[what]
    change(follower.model.module)
    assert follower.follow() == [name]


def test_a_part_with_a_pickle_of_its_own_leaves_attributes_to_travel_alone():
    net = Opaque(deque([1]))
    net.lstm = nn.LSTM(1, 1)
    model = share(net)
    net.held.append(2)
    assert list(model.changes()) == ["attributes"]


def plain_state(net):
    """Return what two modules have alike where their attributes are alike."""
    return [
        {
            name: plain(value)
            for name, value in vars(part).items()
            if not name.startswith("_")
        }
        for part in net.modules()
    ]


def plain(value):
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    return value.gain if isinstance(value, Slotted) else value


def test_a_deleted_attribute_is_deleted(follower):
    del follower.model.module.log
    del follower.model.module.layer.in_features
    assert follower.follow() == ["1.in_features", "log"]
    assert not hasattr(follower.net, "log")
    assert not hasattr(follower.net.layer, "in_features")
    assert follower.model.changes() == {}


def test_a_change_is_seen_again_after_it_was_sent(follower):
    options = follower.model.module.options
    for step in range(3):
        options["deep"] = [{"step": step}]
        assert follower.follow() == ["options"]
        options["deep"][0]["more"] = step
        assert follower.follow() == ["options"]
        assert follower.net.options == options
    follower.model.module.options = {"new": [1]}
    assert follower.follow() == ["options"]
    options["deep"].append(1)  # it belongs to the model no longer
    assert follower.follow() == []


# ---- what attributes share ----------------------------------------------------------


class Sharing(nn.Module):
    """Two parts have attributes that share a list, which other attributes do not."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(1, 1), nn.Linear(1, 1)
        common = [1]
        self.left.log = {"common": common}
        self.right.log = [common, self.left, self.right.weight]
        self.right.alone = [2]


def check_sharing(net):
    assert net.left.log["common"] is net.right.log[0]
    assert net.right.log[1] is net.left
    assert net.right.log[2] is net.right.weight


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.left.log["common"].append(2),
        lambda net: net.left.log.update(a=1),
        lambda net: net.right.log.append(1),
    ],
    ids=["what is shared", "one holder", "the other holder"],
)
def test_what_two_parts_share_stays_one_object(change):
    follower = Follower(share(Sharing()))
    check_sharing(follower.net)
    change(follower.model.module)
    assert follower.follow() == ["1.log", "2.log"]
    check_sharing(follower.net)
    assert follower.net.left.log == follower.model.module.left.log
    assert follower.follow() == []
    follower.model.module.right.alone.append(3)
    assert follower.follow() == ["2.alone"]
    check_sharing(follower.net)


def test_what_comes_to_be_shared_is_one_object():
    follower = Follower(share(Sharing()))
    net = follower.model.module
    net.late = net.right.alone
    follower.follow()
    assert follower.net.late is follower.net.right.alone
    net.late.append(7)
    follower.follow()
    assert follower.net.late is follower.net.right.alone
    assert follower.net.late == [2, 7]


def test_an_object_that_holds_itself_arrives_so():
    follower = Follower(share(Opaque(None)))
    follower.model.module.held = Node()
    assert follower.follow() == ["held"]
    node = follower.net.held
    assert node.circle[0] is node
    follower.model.module.held.circle.append(1)
    assert follower.follow() == ["held"]
    assert follower.net.held.circle[0] is follower.net.held
    assert follower.net.held is not node


# ---- what forward changes -----------------------------------------------------------


def forward(shared, change):
    shared.state.forget_before()
    change(shared.module)
    shared.forward_ends()


def test_what_forward_has_changed_is_not_sent(shared):
    def change(net):
        net.log.append(1)
        net.options["deep"] = [{}]
        net.kept = net.layer(torch.ones(1, 2))
        net.rate += 1
        net.table.add_(1)

    for _ in range(3):
        forward(shared, change)
        assert shared.changes() == {}


def test_what_forward_has_deleted_is_not_sent(shared):
    forward(shared, lambda net: delattr(net, "log"))
    assert shared.changes() == {}


def test_a_change_inside_what_forward_has_made_is_sent_by_its_holder(shared):
    follower = Follower(shared)
    net = shared.module
    forward(shared, lambda net: setattr(net, "state", {"inner": [1]}))
    assert shared.changes() == {}
    for value in (2, 3):
        net.state["inner"].append(value)
        assert follower.follow() == ["state"]
        assert follower.net.state == net.state


def test_what_forward_makes_anew_each_time_is_not_kept(shared):
    gone = []
    for _ in range(300):
        forward(shared, lambda net: setattr(net, "node", Node()))
        gone.append(weakref.ref(shared.module.node))
    shared.state.forget_before()  # it forgets what was before the last
    gc.collect()
    assert sum(node() is not None for node in gone) == 1
    assert shared.changes() == {}


def test_what_forward_makes_anew_in_a_model_with_an_empty_part_is_not_kept():
    shared = share(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    gone = []
    for _ in range(300):
        forward(shared, lambda net: setattr(net, "node", Node()))
        gone.append(weakref.ref(shared.module.node))
        assert shared.changes() == {}
    shared.state.forget_before()
    gc.collect()
    assert sum(node() is not None for node in gone) == 1


def test_what_was_before_a_forward_is_known_until_the_next(shared):
    log = shared.module.log
    forward(shared, lambda net: (setattr(net, "rate", 7), setattr(net, "log", [])))
    ((part, before),) = shared.state.before()
    assert (part, before["rate"]) == (0, 0.5)
    assert before["log"] is log
    shared.state.forget_before()
    assert shared.state.before() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "late", nn.Parameter(torch.ones(1))),
        lambda net: net.add_module("late", nn.Linear(1, 1)),
    ],
    ids=["parameter", "part"],
)
def test_a_forward_that_changes_the_structure_has_the_model_sent_anew(shared, change):
    with pytest.raises(RuntimeError, match="Model has changed its parameters or mod"):
        forward(shared, change)
    assert shared.changes() is None


# ---- what nobody can send or watch --------------------------------------------------


class Opaque(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.held = held


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
    with pytest.raises(CannotTravelError, match=words):
        share(Opaque(make()))
    model = share(Opaque(None))
    model.module.held = make()
    with pytest.raises(CannotTravelError, match=words):
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


# ---- arrays -------------------------------------------------------------------------


def test_arrays_travel_and_are_followed():
    follower = Follower(share(Opaque(np.arange(3.0))))
    assert follower.net.held.tolist() == [0, 1, 2]
    follower.model.module.held[:] = [0, 1, 2]
    assert follower.follow() == []
    follower.model.module.held.fill(7)
    assert follower.follow() == ["held"]
    assert follower.net.held.tolist() == [7, 7, 7]
    forward(follower.model, lambda net: net.held.fill(8))
    assert follower.follow() == []


def test_arrays_with_gaps_travel_and_are_followed():
    grid = np.zeros((4, 6))
    follower = Follower(share(Opaque(grid[:, ::2])))
    grid[0, 1] = 1  # in a gap
    assert follower.follow() == []
    grid[0, 2] = 1
    assert follower.follow() == ["held"]
    assert follower.net.held.tolist() == grid[:, ::2].tolist()


# ---- what replicas have still to receive --------------------------------------------


ONE = torch.ones(1)


def tree_of(value):
    return _native.flatten(value)[0]


def send(outbox, k, tree):
    payload = outbox.payload_for(k, tree)
    outbox.mark_sent(k)
    return payload


def numbers(payload):
    return [update["number"] for update in payload.get("updates", ())]


def test_updates_are_numbered_and_sent_once():
    outbox, tree = Outbox(2), tree_of([1])
    outbox.add({"a": 1})
    outbox.add({"a": 2})
    for k in range(2):
        payload = send(outbox, k, tree)
        assert numbers(payload) == [1, 2]
        assert [update["a"] for update in payload["updates"]] == [1, 2]
        outbox.mark_received(k)
        assert send(outbox, k, tree) == {}
        outbox.mark_received(k)
    outbox.add({})
    assert numbers(send(outbox, 0, tree)) == [3]


def test_a_replica_that_had_no_part_receives_all_later():
    outbox, tree = Outbox(2), tree_of([1])
    for _ in range(3):
        outbox.add({})
        assert len(numbers(send(outbox, 0, tree))) == 1
        outbox.mark_received(0)
    assert numbers(send(outbox, 1, tree)) == [1, 2, 3]


def test_what_is_in_doubt_is_sent_again_in_order():
    outbox, tree = Outbox(2), tree_of([1])
    outbox.add({})
    for k in range(2):
        send(outbox, k, tree)
    outbox.mark_received(0)
    outbox.trees = [tree, tree]
    outbox.resend([1])
    outbox.add({})
    assert numbers(send(outbox, 0, tree)) == [2]
    payload = send(outbox, 1, tree)
    assert numbers(payload) == [1, 2]
    assert payload["tree"] == tree  # the replica may have another still
    assert outbox.trees == [tree, None]
    outbox.resend([1])
    assert numbers(send(outbox, 1, tree)) == [1, 2]


def test_a_tree_of_inputs_is_sent_where_it_is_another():
    outbox, one, other = Outbox(1), tree_of([ONE]), tree_of({"a": ONE})
    again = tree_of([ONE + 1])
    found = [send(outbox, 0, tree) for tree in (one, again, other, one)]
    assert found == [{"tree": one}, {}, {"tree": other}, {"tree": one}]


def test_calls_are_to_be_dropped_until_all_have_received_that():
    outbox, tree = Outbox(2), tree_of([1])
    outbox.add({"dropped": [4, 5]})
    outbox.add({})
    assert set(outbox.dropped()) == {4, 5}
    send(outbox, 0, tree)
    outbox.mark_received(0)
    send(outbox, 1, tree)
    assert outbox.dropped() == [4, 5]
    outbox.mark_received(1)
    assert outbox.dropped() == []


def test_new_replicas_have_received_nothing():
    outbox, tree = Outbox(1), tree_of([1])
    outbox.add({"dropped": [1]})
    send(outbox, 0, tree)
    outbox.clear()
    assert outbox.dropped() == []
    assert outbox.modes is None
    assert send(outbox, 0, tree) == {"tree": tree}
    outbox.add({})
    assert numbers(send(outbox, 0, tree)) == [2]  # numbers go on
