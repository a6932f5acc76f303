"""Tensors and parts that a forward reaches by other ways than registered names."""

import types
import weakref

import pytest
import torch
from replicas import (
    Twin,
    assert_same,
    integer_weights,
    integers,
    linear,
    loss_of,
    modules_of,
    net,
    step,
)
from torch import nn

X = integers(7, 3)


def assert_alike(wrap, make, use):
    """Check that `use(model, module)` returns the same for a module and its wrapper."""
    plain, module = make(), make()
    assert_same(use(wrap(module), module), use(plain, plain))


# ---- trained tensors that are no parameters -----------------------------------------


class Holder(nn.Module):
    """Has a tensor to train that is no parameter, where `kind` says."""

    def __init__(self, kind):
        super().__init__()
        self.linear = linear()
        tensor = integers(3).requires_grad_()
        self.find = lambda: tensor
        if kind == "attribute":
            self.held = tensor
        elif kind == "computed":
            self.held = tensor * 2
        elif kind == "hidden":
            self.held = [linear(), linear()]
            self.find = lambda: self.held[0].weight
        elif kind == "closure":
            self.held = lambda: tensor
        elif kind == "default":
            self.held = lambda tensor=tensor: tensor

    def forward(self, x):
        if isinstance(self.held, list):
            return self.held[0](self.linear(x))
        return self.linear(x) * (self.held() if callable(self.held) else self.held)


@pytest.mark.parametrize(
    "kind", ["attribute", "computed", "hidden", "closure", "default"]
)
def test_a_trained_tensor_that_is_no_parameter_gets_its_gradient(wrap, kind):
    def use(model, module):
        step(model, X).backward()
        return [module.find().grad, module.linear.weight.grad]

    assert_alike(wrap, lambda: Holder(kind), use)


class Boxed(nn.Module):
    """Takes a box, in which nobody looks for tensors."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, box):
        return self.linear(x) * box.tensor


def test_a_trained_tensor_inside_an_argument_gets_its_gradient(wrap):
    def use(model, module):
        box = types.SimpleNamespace(tensor=integers(3).requires_grad_())
        loss_of(model(X, box)).backward()
        return [box.tensor.grad, module.linear.weight.grad]

    assert_alike(wrap, Boxed, use)


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


@pytest.mark.parametrize("is_buffer", [True, False], ids=["buffer", "attribute"])
def test_views_of_parameters_and_buffers_follow_them(wrap, is_buffer):
    def use(model, module):
        outs = [model(X)]
        with torch.no_grad():
            module.linear.weight.add_(1)
        outs.append(model(X))
        module.window.add_(1)
        return [*outs, model(X)]

    assert_alike(wrap, lambda: Viewing(is_buffer), use)


def test_parameters_follow_the_flat_tensor_that_they_are_views_of(wrap):
    def make():
        module = net()
        module.flat = [nn.utils.parameters_to_vector(module.parameters()).detach()]
        nn.utils.vector_to_parameters(module.flat[0], module.parameters())
        return module

    def use(model, module):
        outs = [model(X)]
        module.flat[0].mul_(2)
        return [*outs, model(X)]

    assert_alike(wrap, make, use)


# ---- other classes, other hooks, other weights --------------------------------------


class Marked(torch.Tensor):
    """A subclass with a meaning."""


class Asking(nn.Module):
    """Tells marked tensors from others."""

    def forward(self, x):
        return torch.full((len(x),), float(type(x) is Marked))


def test_tensors_of_a_subclass_keep_their_type(wrap):
    assert_alike(wrap, Asking, lambda model, _: [model(X.as_subclass(Marked))])


def test_hooks_for_all_modules_may_come_after_the_first_call(wrap):
    hook = nn.modules.module.register_module_forward_hook

    def use(model, _):
        outs = [model(X)]
        handle = hook(lambda m, _, out: out * 2 if isinstance(m, nn.ReLU) else None)
        try:
            outs.append(model(X))
        finally:
            handle.remove()
        return [*outs, model(X)]

    assert_alike(wrap, net, use)


class Wrapped(nn.Module):
    """Holds another module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("is_first", [True, False], ids=["at once", "later"])
def test_weights_that_are_computed_pass_their_gradient_on(wrap, is_first):
    def use(model, _):
        if not is_first:
            model(X)
        base = integers(3, 3, seed=3).requires_grad_()
        name = "inner.weight" if model.__class__ is nn.Linear else "inner.module.weight"
        out = torch.func.functional_call(Wrapped(model), {name: base * 2}, (X,))
        loss_of(out).backward()
        return [out, base.grad]

    assert_alike(wrap, linear, use)


# ---- ways to a part -----------------------------------------------------------------


def leading_by_closure():
    inner = linear(2)

    class Outer(Wrapped):
        def forward(self, x):
            return inner(x)

    return Outer(inner)


def leading_by_attribute():
    class Outer(Wrapped):
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


@pytest.mark.parametrize("make", [leading_by_closure, leading_by_attribute, Looking])
def test_a_part_may_be_reached_past_the_module(wrap, make):
    def use(model, module):
        out = model(X)
        loss_of(out).backward()
        return [out, *(p.grad for p in module.parameters())]

    assert_alike(wrap, make, use)


class Told(nn.Module):
    """Adds 1 to its rows if a function of the module holds."""

    def __init__(self, asks):
        super().__init__()
        self.asks, self.weight = asks, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + float(self.asks(self))


def one_buffer_twice():
    module = Told(lambda m: m.first is m.second)
    module.register_buffer("first", torch.ones(1))
    module.register_buffer("second", module.first)
    module.register_buffer("none", None)
    return module


def one_part_twice():
    module = Told(lambda m: m.a is m.b and m.c is None)
    module.a = module.b = nn.Linear(1, 1)
    module.register_module("c", None)
    return module


def attributes_that_lead_to_a_part():
    def leads(module):
        found = [module.pair[0], module.table["part"], module.hidden]
        return all(m is module.part for m in (*found, module.method.__self__))

    module = Told(leads)
    module.part = nn.Linear(1, 1)
    module.pair, module.table = [module.part, 1], {"part": module.part}
    module.method = module.part.forward
    object.__setattr__(module, "hidden", module.part)
    return module


def a_forward_of_the_object():
    module = Told(None)

    def forward(self, x):
        is_whole = isinstance(self, Told) and self.weight is next(self.parameters())
        return x + float(is_whole)

    module.forward = types.MethodType(forward, module)
    return module


MAKES = [
    one_buffer_twice,
    one_part_twice,
    attributes_that_lead_to_a_part,
    a_forward_of_the_object,
]


@pytest.mark.parametrize("make", MAKES)
def test_each_replica_leads_to_its_own_parts(wrap, make):
    ours = wrap(make())
    for _ in range(2):
        assert torch.equal(ours(X), X + 1)


class Replicating(nn.Linear):
    """Makes its replicas itself, as torch lets it."""

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()
        replica.mine = True
        return replica

    def forward(self, x):
        flags = hasattr(self, "mine"), getattr(self, "_is_replica", False)
        return torch.tensor([flags] * len(x))


def test_replicas_tell_that_they_are_and_may_be_made_by_the_module(wrap):
    flags = wrap(Replicating(3, 2).double())(X)
    assert flags.tolist() == [[False, False]] * 4 + [[True, True]] * 3


# ---- a backward inside forward ------------------------------------------------------


class TrainingInside(nn.Module):
    """Runs a backward in forward, through a layer whose output it does not return."""

    def __init__(self, n_wide, is_on):
        super().__init__()
        self.wide = integer_weights(nn.Linear(3, n_wide))
        self.linear = linear()
        self.is_on = is_on

    def forward(self, x):
        if self.is_on:
            self.wide(x).square().sum().backward()
        return self.linear(x)


@pytest.mark.parametrize("n_wide", [2, 8000], ids=["small", "large"])
@pytest.mark.parametrize("is_on", [True, False], ids=["at first", "later"])
def test_a_backward_inside_forward_reaches_all_gradients(wrap, n_wide, is_on):
    twin = Twin(wrap, TrainingInside(n_wide, is_on))
    twin.step(step, X)
    for module in modules_of(twin):
        module.is_on = True
    for _ in range(2):
        twin.step(step, X)


class InputGradient(nn.Module):
    """Returns the gradient of its input, for which it runs a backward."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        x = x.detach().requires_grad_()
        self.linear(x).square().sum().backward(inputs=[x])
        return self.linear(x.grad)


def test_a_backward_for_an_input_alone_may_run_in_forward(wrap):
    twin = Twin(wrap, InputGradient())
    for _ in range(2):
        twin.step(step, X)
