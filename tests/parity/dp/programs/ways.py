"""Tensors and parts that a forward reaches by other ways than registered names."""

import functools
import sqlite3
import threading
import types
import weakref

import torch
from replicas import (
    Parent,
    bare,
    integers,
    linear,
    loss_of,
    net,
    step,
)
from torch import nn

from programs import CPU, Made, X, program, steps, trains, uses

# ---- trained tensors that are no parameters -----------------------------------------


class Holder(nn.Module):
    """Has a tensor to train that is no parameter, where `kind` says."""

    def __init__(self, kind):
        super().__init__()
        self.linear = linear()
        tensor = integers(3).requires_grad_()
        self.find = lambda: tensor
        if kind == "hidden":
            self.held = [linear(), linear()]
            self.find = lambda: self.held[0].weight
        else:
            self.held = {
                "attribute": tensor,
                "computed": tensor * 2,
                "closure": lambda: tensor,
                "default": lambda tensor=tensor: tensor,
            }[kind]

    def forward(self, x):
        if isinstance(self.held, list):
            return self.held[0](self.linear(x))
        return self.linear(x) * (self.held() if callable(self.held) else self.held)


for kind in ("attribute", "computed", "hidden", "closure", "default"):

    @uses(functools.partial(Holder, kind), {kind: None})
    def a_trained_tensor_that_is_no_parameter_gets_its_gradient(model, _):
        step(model, X).backward()
        return bare(model).find().grad


@uses(lambda: Made(lambda m, x, box: m.layer(x) * box.tensor, {"layer": linear()}))
def a_trained_tensor_inside_an_argument_gets_its_gradient(model):
    box = types.SimpleNamespace(tensor=integers(3).requires_grad_())
    loss_of(model(X, box)).backward()
    return box.tensor.grad


# ---- views --------------------------------------------------------------------------


class Viewing(nn.Module):
    """Has a view of a parameter beside it, and one of a buffer."""

    def __init__(self, is_buffer):
        super().__init__()
        self.linear = linear()
        view = self.linear.weight.data[0]
        if is_buffer:
            self.register_buffer("view", view)
        else:
            self.view = view
        self.register_buffer("table", integers(6))
        self.window = self.table[2:5]

    def forward(self, x):
        return self.linear(x) * self.window.sum() + self.view + self.table.sum()


trains(
    {
        "views_of_parameters_and_buffers[buffer]": lambda: Viewing(True),
        "views_of_parameters_and_buffers[attribute]": lambda: Viewing(False),
    },
    steps(
        lambda m: m.linear.weight.data.add_(1), lambda m: m.window.add_(1), descend=None
    ),
)


def flattened():
    made = net()
    made.flat = [nn.utils.parameters_to_vector(made.parameters()).detach()]
    nn.utils.vector_to_parameters(made.flat[0], made.parameters())
    return made


trains(
    {"parameters_follow_the_flat_tensor_that_they_are_views_of": flattened},
    steps(lambda m: m.flat[0].mul_(2)),
)


# ---- ways to a part -----------------------------------------------------------------


def leading_by_closure():
    inner = linear(2)
    return Made(lambda m, x: inner(x), {"inner": inner})


def leading_by_attribute():
    class Outer(Parent):
        part = linear(2)

        def forward(self, x):
            return self.part(x)

    return Outer(Outer.part)


class Looking(nn.Module):
    """Has a layer, and looks at it through a weak proxy, which is a part of it too."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.same = weakref.proxy(self.linear)

    def forward(self, x):
        return self.linear(x) + self.same.weight.sum()


for make in (leading_by_closure, leading_by_attribute, Looking):
    trains({f"a_part_is_reached_past_the_module[{make.__name__}]": make}, descend=None)


def buffer_twice(m):
    m.register_buffer("first", torch.ones(1))
    m.register_buffer("second", m.first)


def part_twice(m):
    m.first = m.second = nn.Linear(1, 1)
    m.register_module("none", None)


for init in (buffer_twice, part_twice):

    @program(label=init.__name__, init=init)
    def each_replica_has_one_thing_under_two_names(m, x):
        return x * (1 + float(m.first is m.second))


def ways_to_a_part(m):
    m.part = linear()
    m.pair, m.table = [m.part, 1], {"part": m.part}
    m.method = m.part.forward
    object.__setattr__(m, "hidden", m.part)


@program(init=ways_to_a_part)
def attributes_of_a_replica_lead_to_its_own_part(m, x):
    found = [m.pair[0], m.table["part"], m.hidden, m.method.__self__]
    assert all(part is m.part for part in found)
    return m.method(x)


def own_forward(m):
    def forward(self, x):
        return self.layer(x) * (1 + float(self.layer.weight is next(self.parameters())))

    m.forward = types.MethodType(forward, m)


@program(layer=linear(), init=own_forward)
def a_forward_of_the_object_is_called_with_the_replica(m, x):
    raise AssertionError


class Child(nn.Module):
    """Leads to its parent by a weak reference."""

    def __init__(self, parent):
        super().__init__()
        self.find = weakref.ref(parent)

    def forward(self, x):
        return self.find().last(x)


class Leading(nn.Module):
    """Reaches its normalisation by what leads to the module, and not to `self`."""

    def __init__(self, way):
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.layer = nn.Linear(3, 3, bias=False).double()
        self.call = {
            "weak reference": lambda: Child(self),
            "partial": lambda: functools.partial(self.last),
            "lambda": lambda: lambda x: self.last(x),
        }[way]()

    def last(self, x):
        return self.norm(x)

    def forward(self, x):
        return self.layer(self.call(x))


for way in ("weak reference", "partial", "lambda"):
    trains(
        {f"a_replica_reads_the_module_itself[{way}]": lambda w=way: Leading(w).eval()},
        on=CPU,
        exact=False,
    )


# ---- what belongs to a thread -------------------------------------------------------


class Slotted(nn.Module):
    """Has slots: of a number, a tensor, and a part that is registered too."""

    __slots__ = ("factor", "part", "table")

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.factor, self.table, self.part = 2, integers(3), self.layer

    def forward(self, x):
        assert self.part is self.layer
        return self.part(self.layer(x) % 5) * self.factor + self.table


class Heir(Slotted):
    """Has slots of its own, and a dictionary."""

    __slots__ = ("shift",)

    def __init__(self):
        super().__init__()
        self.shift = 3

    def forward(self, x):
        return super().forward(x) + self.shift


def of_a_thread():
    local = threading.local()
    local.factor = 2
    return Made(lambda m, x: m.layer(x) * m.local.factor, vars_of(local=local))


def locking(lock):
    def forward(m, x):
        assert m.lock.acquire(timeout=10)
        try:
            return m.layer(x)
        finally:
            m.lock.release()

    return Made(forward, vars_of(lock=lock))


def querying():
    base = sqlite3.connect(":memory:")
    base.execute("CREATE TABLE factors (value INTEGER)")
    base.execute("INSERT INTO factors VALUES (3)")

    def forward(m, x):
        ((factor,),) = m.base.execute("SELECT value FROM factors")
        return m.layer(x) * factor

    return Made(forward, vars_of(base=base))


def vars_of(**held):
    return {"layer": linear(), **held}


def held_by_the_caller(model, x):
    with bare(model).lock:
        return model(x)


trains(
    {
        "slots": Slotted,
        "slots of an heir": Heir,
        "threading.local": of_a_thread,
        "a lock": lambda: locking(threading.Lock()),
        "a data base": querying,
    },
    steps(n=10),
    on=CPU,
)
trains(
    {"a lock that the caller holds": lambda: locking(threading.RLock())},
    steps(n=10, call=held_by_the_caller),
    on=CPU,
)


@uses(of_a_thread, on=CPU)
def replicas_on_the_cpu_start_no_thread(model):
    before = threading.active_count()
    for _ in range(3):
        step(model, X).backward()
    return threading.active_count() - before
