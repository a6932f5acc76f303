"""What attributes hold may change after wrapping, and every replica sees it."""

import copy
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from replicas import Twin, integers, linear, modules_of, pair_of
from torch import nn

# ---- what attributes hold -----------------------------------------------------------


@dataclass
class Options:
    gain: int = 1
    steps: list = field(default_factory=lambda: [1, 2])


class Plain:
    """An object as people write them."""

    def __init__(self):
        self.value = 1
        self.inner = SimpleNamespace(value=2, names={"a": 1})


class Leaving(nn.Module):
    """Leaves behind what cannot travel, as classes with a lock do."""

    def __init__(self):
        super().__init__()
        self.factor = 1
        self.local = {"lock": threading.Lock()}

    def __getstate__(self):
        return {k: v for k, v in super().__getstate__().items() if k != "local"}

    def forward(self, x):
        return x * self.factor


class Chosen:
    """Says itself what of it is pickled."""

    def __init__(self):
        self.value = 1

    def __getstate__(self):
        return {"value": self.value}


class Reader(nn.Module):
    """Reads a list that another module holds too."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        return x + sum(self.shared)


def frozen(rows, columns):
    return linear(rows, columns).requires_grad_(False)


class Holder(nn.Module):
    """Computes with all that it holds, each by a weight of its own."""

    def __init__(self):
        super().__init__()
        self.linear = linear(2)
        self.power, self.more, self.alias = 1, 4, [1]
        self.scales = [1, 2]
        self.options = {"power": 1, "deep": {"bias": [0, 1], "more": ({"x": 1}, 5)}}
        self.ordered = OrderedDict(a=1, b=2)
        self.marks = {1, 2}
        self.window = deque([1, 2], maxlen=3)
        self.config = Options()
        self.space = SimpleNamespace(gain=1)
        self.plain = Plain()
        self.chosen = Chosen()
        self.table = integers(2, seed=1)
        self.tensors = [integers(2, seed=2), {"t": integers(2, seed=3)}]
        self.array = np.arange(4.0)
        self.unregistered = [frozen(2, 2), Leaving()]
        self.leaving = Leaving()
        self.reader = Reader([1])
        self.shared = self.reader.shared

    def numbers(self):
        yield self.power + getattr(self, "more", 0)
        yield 5 * self.scales[0] + 2 * self.scales[-1] + len(self.scales)
        yield self.options["power"] + sum(self.options["deep"]["bias"])
        yield self.options["deep"]["more"][0]["x"] + len(self.options)
        yield sum((i + 2) * v for i, v in enumerate(self.ordered.values()))
        yield sum(self.marks)
        yield sum(self.alias)
        yield sum((i + 1) * v for i, v in enumerate(self.window))
        yield self.config.gain + sum(self.config.steps)
        yield self.space.gain + self.plain.value + self.chosen.value
        yield self.plain.inner.value + sum(self.plain.inner.names.values())
        yield float(self.table.sum())
        yield sum(float(t.sum()) for t in (self.tensors[0], self.tensors[1]["t"]))
        yield float(self.array.sum())
        yield 1 if self.shared is self.reader.shared else 1000

    def forward(self, x):
        weighed = sum((i + 3) * number for i, number in enumerate(self.numbers()))
        return self.reader(self.leaving(self.last(self.linear(x)))) * weighed

    def last(self, x):
        for module in self.unregistered:
            x = module(x) % 11
        return x


def _set(path, value):
    """Return a change that assigns to an attribute or a member."""

    def change(model):
        held = model
        for name in path[:-1]:
            held = getattr(held, name) if isinstance(name, str) else held[name[0]]
        last = path[-1]
        if isinstance(last, str):
            setattr(held, last, value)
        else:
            held[last[0]] = value

    return change


HELD = {
    "an attribute": _set(["power"], 5),
    "a new attribute": lambda m: setattr(m, "numbers", lambda: [7]),
    "an attribute less": lambda m: vars(m).pop("more", None),
    "an item of a list": _set(["scales", [1]], 9),
    "append": lambda m: m.scales.append(4),
    "del": lambda m: m.scales.__delitem__(0),
    "insert": lambda m: m.scales.insert(0, 8),
    "clear and extend": lambda m: (m.scales.clear(), m.scales.extend([3, 3, 3])),
    "a value of a dict": _set(["options", ["power"]], 6),
    "a new key": lambda m: m.options.update(new=1),
    "deep in dicts": lambda m: m.options["deep"]["bias"].append(6),
    "in a dict in a tuple": lambda m: m.options["deep"]["more"][0].update(x=5),
    "a dict that is replaced": lambda m: m.options.update(deep=copy.deepcopy(NEW)),
    "inside what is new": lambda m: new_list_of(m).append(2),
    "the order of a dict": lambda m: m.ordered.update(a=m.ordered.pop("a")),
    "a key less": lambda m: m.ordered.popitem(),
    "a set": lambda m: (m.marks.add(7), m.marks.discard(1)),
    "a deque": lambda m: m.window.append(5),
    "a deque that is full": lambda m: m.window.extend([4, 5, 6]),
    "a field of a dataclass": _set(["config", "gain"], 4),
    "a list in a dataclass": lambda m: m.config.steps.append(4),
    "a namespace": _set(["space", "gain"], 4),
    "an object": _set(["plain", "value"], 4),
    "objects in objects": _set(["plain", "inner", "value"], 5),
    "a dict in them": lambda m: m.plain.inner.names.update(b=3),
    "an object that pickles itself": _set(["chosen", "value"], 5),
    "the class of an object": lambda m: setattr(m.config, "__class__", Louder),
    "a tensor in place": lambda m: m.table.add_(1),
    "a tensor's data": lambda m: m.table.data.add_(1),
    "a tensor anew": lambda m: setattr(m, "table", integers(2, seed=8)),
    "a tensor in a list": lambda m: m.tensors[0].mul_(3).add_(1),
    "a tensor in a dict": lambda m: m.tensors[1]["t"].mul_(3).add_(1),
    "another tensor there": lambda m: m.tensors.__setitem__(0, integers(2, seed=9)),
    "weights that nobody has registered": lambda m: m.unregistered[0].weight.add_(1),
    "a module there": lambda m: m.unregistered.append(frozen(2, 2)),
    "what a module leaves behind": lambda m: m.leaving.local.update(more=iter([])),
    "an attribute beside it": lambda m: setattr(m.leaving, "factor", 3),
    "an array": lambda m: m.array.__iadd__(1),
    "an array anew": lambda m: setattr(m, "array", np.arange(6.0)),
    "a list by another name": lambda m: setattr(m, "alias", m.scales),
    "by either name": lambda m: m.scales.append(6),
    "a list that two hold": lambda m: m.shared.append(3),
    "another list for both": lambda m: _share_anew(m, [5]),
}
NEW = {"bias": [3], "more": ({"x": 4}, 1)}


def new_list_of(model):
    """Replace a dict once, and return a list in it."""
    if model.options["deep"]["bias"] == [0, 1]:
        model.options["deep"] = copy.deepcopy(NEW)
    return model.options["deep"]["bias"]


class Louder(Options):
    @property
    def gain(self):
        return 11


def _share_anew(model, shared):
    model.shared = model.reader.shared = shared


@pytest.mark.parametrize("engine_first", [False, True], ids=["before", "after"])
def test_what_attributes_hold_may_change_in_any_way(wrap, engine_first):
    """One wrapper takes all the changes, one after the other."""
    twin = pair_of(wrap, Holder)
    if engine_first:
        twin.compare(lambda model, x: model(x), integers(7, 3))
    x = integers(7, 3)
    for name, change in HELD.items():
        if name == "a new attribute":
            continue
        for model in modules_of(twin):
            change(model)
        theirs, mine = twin.run(lambda model, x: model(x), x)
        assert torch.equal(mine, theirs), name
    for model in modules_of(twin):
        HELD["a new attribute"](model)
    twin.compare(lambda model, x: model(x), x)


@pytest.mark.parametrize("change", HELD.values(), ids=HELD)
def test_every_such_change_changes_the_output(change):
    """Or the test above could not fail."""
    model = Holder()
    x = integers(7, 3)
    before = model(x)
    change(model)
    if change is not HELD["what a module leaves behind"]:
        assert not torch.equal(model(x), before)


class Remembering(nn.Module):
    """Changes what it holds in forward, each in its own way."""

    def __init__(self):
        super().__init__()
        self.linear = linear(2)
        self.log = []
        self.counts = {"calls": 0}
        self.state = {"last": [0]}
        self.moving = torch.zeros(2, dtype=torch.float64)
        self.kept = None

    def forward(self, x):
        self.log.append(len(self.log))
        self.counts["calls"] += 1
        self.state = {"last": [*self.state["last"], 1]}
        self.moving.add_(1)
        out = self.linear(x) * sum(self.log) + self.moving
        self.kept = out  # with its graph, as people do
        return out * self.counts["calls"] + sum(self.state["last"])


REMEMBERED = {
    "nothing": lambda m: None,
    "a list": lambda m: m.log.clear(),
    "a list grows": lambda m: m.log.append(10),
    "a dict": lambda m: m.counts.update(calls=7),
    "inside what forward has made": lambda m: m.state["last"].append(9),
    "a tensor": lambda m: m.moving.zero_(),
    "the dtype": lambda m: m.double().register_buffer("new", torch.ones(1)),
}


def test_what_a_forward_changes_stays_and_may_be_changed_between(wrap):
    twin = Twin(wrap, Remembering())
    x = integers(7, 3)
    for name, change in REMEMBERED.items():
        for _ in range(2):
            theirs, mine = twin.run(lambda model, x: model(x), x)
            if wrap.engine == "process":  # threads share what attributes hold, as torch
                assert torch.equal(mine, theirs), name
        for model in modules_of(twin):
            change(model)
    if wrap.engine == "process":
        twin.compare(lambda model, x: model(x), x)
        assert twin.inner.log == twin.plain.log
        assert twin.inner.counts == twin.plain.counts


def test_a_small_batch_leaves_replicas_that_hear_of_it_later(wrap):
    """One row runs in replica 0 alone: what it has changed is news for the others."""
    twin = Twin(wrap, Remembering())
    if wrap.engine == "thread":
        pytest.skip("threads share what attributes hold, as torch's replicas do")
    for rows in (7, 1, 7, 2, 1, 7):
        twin.compare(lambda model, x: model(x), integers(rows, 3))


def test_two_wrappers_of_one_module_see_each_change(wrap):
    plain, module = Holder(), Holder()
    wrappers = [wrap(module), wrap(module, 3)]
    x = integers(7, 3)
    for name in ("append", "a tensor in place", "a value of a dict", "a deque"):
        for model in (plain, module):
            HELD[name](model)
            model.linear.weight.data = integers(2, 3, seed=len(name))
        for wrapper in wrappers:
            assert torch.equal(wrapper(x), plain(x)), name
