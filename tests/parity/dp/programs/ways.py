"""Tensors and parts that a forward does not reach by registered names."""

import functools
import threading
import types
import weakref

from replicas import Parent, bare, integers, linear, loss_of, step
from torch import nn

from programs import CPU, Made, X, module, program, trains, uses


def holding(kind):
    """Return a module that trains a tensor which is not a parameter."""
    layers, tensor = [linear(), linear()], integers(3).requires_grad_()
    held, code = {
        "attribute": (tensor, lambda m, x: m.layer(x) * m.held),
        "computed": (tensor * 2, lambda m, x: m.layer(x) * m.held),
        "hidden": (layers, lambda m, x: m.held[0](m.layer(x))),
        "closure": (None, lambda m, x: m.layer(x) * tensor),
        "default": (None, lambda m, x, tensor=tensor: m.layer(x) * tensor),
    }[kind]
    made = Made(code, {"layer": linear(), "held": held})
    made.find = lambda: layers[0].weight if kind == "hidden" else tensor
    return made


for kind in ("attribute", "computed", "hidden", "closure", "default"):

    @uses(functools.partial(holding, kind), [kind])
    def a_trained_tensor_that_is_no_parameter_gets_its_gradient(model, _):
        step(model, X).backward()
        return bare(model).find().grad


@uses(module(lambda m, x, box: m.layer(x) * box.tensor, layer=linear()))
def a_trained_tensor_inside_an_argument_gets_its_gradient(model):
    box = types.SimpleNamespace(tensor=integers(3).requires_grad_())
    loss_of(model(X, box)).backward()
    return box.tensor.grad


def leading_by_closure():
    inner = linear(2)
    return Made(lambda m, x: inner(x), {"inner": inner})


def leading_by_attribute():
    class Outer(Parent):
        part = linear(2)

        def forward(self, x):
            return self.part(x)

    return Outer(Outer.part)


def leading_by_proxy():
    made = module(lambda m, x: m.layer(x) + m.same.weight.sum(), layer=linear())
    made.same = weakref.proxy(made.layer)
    return made


for make in (leading_by_closure, leading_by_attribute, leading_by_proxy):
    trains(
        {f"a_part_is_reached_past_the_module[{make.__name__}]": make}, descends=False
    )


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
    """Refers to its parent by a weak reference."""

    def __init__(self, parent):
        super().__init__()
        self.find = weakref.ref(parent)

    def forward(self, x):
        return self.find().apply_last(x)


class Leading(nn.Module):
    """Reaches its normalisation through the module, not through `self`."""

    def __init__(self, way):
        super().__init__()
        self.last = nn.BatchNorm1d(3).double()
        self.layer = nn.Linear(3, 3, bias=False).double()
        self.call = {
            "weak reference": lambda: Child(self),
            "partial": lambda: functools.partial(self.apply_last),
            "lambda": lambda: lambda x: self.apply_last(x),
        }[way]()

    def apply_last(self, x):
        return self.last(x)

    def forward(self, x):
        return self.layer(self.call(x))


for way in ("weak reference", "partial", "lambda"):
    trains(
        {f"a_replica_reads_the_module_itself[{way}]": lambda w=way: Leading(w).eval()},
        on=CPU,
        exact=False,
    )


class Slotted(nn.Module):
    """Has slots for a tensor, and for a part that is also registered."""

    __slots__ = ("part", "table")


class Heir(Slotted):
    """Has one more slot, and a dictionary."""

    __slots__ = ("factor",)

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.factor, self.table, self.part = 2, integers(3), self.layer

    def forward(self, x):
        assert self.part is self.layer
        return self.part(self.layer(x) % 5) * self.factor + self.table


def locked(m, x):
    with m.lock:
        return m.layer(x) * m.local.factor


def locking():
    """Return a module with a lock and thread-local data, which cannot be copied."""
    local = threading.local()
    local.factor = 2
    return Made(locked, {"layer": linear(), "lock": threading.RLock(), "local": local})


def while_it_is_locked(model, x):
    with bare(model).lock:
        return model(x)


trains({"slots": Heir}, on=CPU)
trains({"a lock that the caller holds": locking}, call=while_it_is_locked, on=CPU)
