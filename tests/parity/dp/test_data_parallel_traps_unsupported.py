"""What only its own process can run: processes refuse it, and `auto` takes threads."""

import copy
import re
import sys
import weakref

import paceline
import pytest
import torch
from paceline._replicas.errors import UnsupportedModelError
from replicas import (
    Twin,
    assert_close,
    integer_weights,
    integers,
    linear,
    loss_of,
    modules_of,
    net,
    step,
)
from torch import nn

TWO = ["cpu"] * 2
pytestmark = pytest.mark.usefixtures("idle_workers")


def assert_stays(make, use, words, *, ends_as="thread"):
    """Check that processes refuse a model, and that `auto` runs it by threads.

    `use(model, module)` returns what is to be the same as for the plain module.
    """
    module = make()
    with (
        paceline.DataParallel(module, TWO, engine="process") as wrapper,
        pytest.raises(UnsupportedModelError, match=words),
    ):
        use(wrapper, module)
    plain, module = make(), make()
    theirs = use(plain, plain)
    with paceline.DataParallel(module, TWO) as wrapper:
        mine = use(wrapper, module)
        assert wrapper.engine == ends_as
    for pair in zip(mine, theirs, strict=True):
        assert_close(*pair)


def run_once(model, _):
    return [model(integers(7, 3))]


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
def test_a_trained_tensor_that_is_no_parameter_gets_its_gradient(kind):
    def use(model, module):
        step(model, integers(7, 3)).backward()
        return [module.find().grad, module.linear.weight.grad]

    assert_stays(lambda: Holder(kind), use, "requires a gradient")


class Box:
    """Holds a tensor where nobody looks."""

    def __init__(self, tensor):
        self.tensor = tensor


class Boxed(nn.Module):
    """Takes a box."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, box):
        return self.linear(x) * box.tensor


def test_a_trained_tensor_inside_an_argument_gets_its_gradient():
    def use(model, module):
        box = Box(integers(3).requires_grad_())
        loss_of(model(integers(7, 3), box)).backward()
        return [box.tensor.grad, module.linear.weight.grad]

    assert_stays(Boxed, use, "requires a gradient")


class Viewing(nn.Module):
    """Has a view of a parameter beside it."""

    def __init__(self, is_buffer):
        super().__init__()
        self.linear = linear()
        view = self.linear.weight.data[0]
        if is_buffer:
            self.register_buffer("view", view)
        else:
            self.view = view

    def forward(self, x):
        return self.linear(x) + self.view


@pytest.mark.parametrize("is_buffer", [True, False], ids=["buffer", "attribute"])
def test_a_view_of_a_parameter_follows_it(is_buffer):
    def use(model, module):
        outs = [model(integers(7, 3))]
        with torch.no_grad():
            module.linear.weight.add_(1)
        return [*outs, model(integers(7, 3))]

    assert_stays(lambda: Viewing(is_buffer), use, "share their memory")


class Windowed(nn.Module):
    """Looks at a part of its buffer through an attribute."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("table", integers(6))
        self.window = self.table[2:5]

    def forward(self, x):
        return self.linear(x) * self.window.sum() + self.table.sum()


def test_a_view_of_a_buffer_follows_it():
    def use(model, module):
        outs = [model(integers(7, 3))]
        module.window.add_(1)
        return [*outs, model(integers(7, 3))]

    assert_stays(Windowed, use, "shares its memory with the buffer 'table'")


def test_parameters_follow_the_flat_tensor_that_they_are_views_of():
    def make():
        module = net()
        module.flat = [nn.utils.parameters_to_vector(module.parameters()).detach()]
        nn.utils.vector_to_parameters(module.flat[0], module.parameters())
        return module

    def use(model, module):
        outs = [model(integers(7, 3))]
        module.flat[0].mul_(2)
        return [*outs, model(integers(7, 3))]

    assert_stays(make, use, "share their memory")


class Marked(torch.Tensor):
    """A subclass with a meaning."""


class Asking(nn.Module):
    """Tells marked tensors from others."""

    def forward(self, x):
        return torch.full((len(x),), float(type(x) is Marked))


def test_tensors_of_a_subclass_keep_their_type():
    def use(model, _):
        return [model(integers(7, 3).as_subclass(Marked))]

    assert_stays(Asking, use, "subclass of torch.Tensor")


def test_hooks_for_all_modules_may_come_after_the_first_call():
    hook = nn.modules.module.register_module_forward_hook

    def use(model, _):
        outs = [model(integers(7, 3))]
        handle = hook(lambda m, _, out: out * 2 if isinstance(m, nn.ReLU) else None)
        try:
            outs.append(model(integers(7, 3)))
        finally:
            handle.remove()
        return outs

    words = "hooks are registered for all modules"
    assert_stays(net, use, words, ends_as="process")  # they have gone again


def test_a_class_that_no_other_process_can_import_stays(tmp_path, monkeypatch):
    code = "import torch\n\n\nclass Hidden(torch.nn.Linear):\n    pass\n"
    (tmp_path / "module_of_a_hub.py").write_text(code)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        hub = __import__("module_of_a_hub")
    try:
        hidden = integer_weights(hub.Hidden(3, 2))
        words = r"^a worker process cannot build it \(ModuleNotFoundError: [^\n]*\)$"
        assert_stays(lambda: copy.deepcopy(hidden), run_once, words)
    finally:
        del sys.modules["module_of_a_hub"]


def leading_by_closure():
    inner = integer_weights(nn.Linear(3, 2))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return inner(x)

    return Outer()


def leading_by_attribute():
    class Outer(nn.Module):
        part = integer_weights(nn.Linear(3, 2))

        def __init__(self):
            super().__init__()
            self.inner = self.part

        def forward(self, x):
            return self.part(x)

    return Outer()


@pytest.mark.parametrize("make", [leading_by_closure, leading_by_attribute])
def test_a_class_that_refers_to_a_part_of_its_model_stays(make):
    words = r"a class of the model refers to one of the model's own parts \(a Linear\)"
    assert_stays(make, run_once, words)
    with paceline.DataParallel(make(), TWO) as wrapper:
        wrapper(integers(7, 3))
        assert re.match(words, wrapper.engine_reason)
        assert "\n" not in wrapper.engine_reason


class Scaled(nn.Module):
    """Takes an object as an argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, option=None):
        return self.linear(x) * (option.scale if option else 1)


def test_an_argument_that_no_worker_can_load_is_an_error_each_time(
    tmp_path, monkeypatch
):
    (tmp_path / "module_of_options.py").write_text("class Option:\n    scale = 3\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        options = __import__("module_of_options")
    x = integers(4, 3)
    module = integer_weights(Scaled())
    try:
        with paceline.DataParallel(module, ["cpu"] * 2, engine="process") as ours:
            assert torch.equal(ours(x), module(x))
            for _ in range(2):  # the form of the first call is not taken for this one's
                with pytest.raises(ModuleNotFoundError, match="module_of_options"):
                    ours(x, options.Option())
            module.eval()
            assert torch.equal(ours(x), module(x))
    finally:
        del sys.modules["module_of_options"]


class Wrapped(nn.Module):
    """Holds another module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("is_first", [True, False], ids=["at once", "later"])
def test_weights_that_are_computed_pass_their_gradient_on(is_first):
    def use(model, _):
        if not is_first:
            model(integers(7, 3))
        base = integers(3, 3, seed=3).requires_grad_()
        name = "inner.weight" if model.__class__ is nn.Linear else "inner.module.weight"
        out = torch.func.functional_call(
            Wrapped(model), {name: base * 2}, (integers(7, 3),)
        )
        loss_of(out).backward()
        return [out, base.grad]

    words = "is computed from other tensors"
    assert_stays(linear, use, words, ends_as="process")  # for that call alone


class Unsendable:
    """Cannot be pickled."""

    def __reduce__(self):
        raise TypeError("it stays here")


class Leaking(Wrapped):
    """Returns what cannot travel, and counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x), Unsendable()


def test_an_output_that_cannot_travel_does_not_run_the_module_twice():
    module = Leaking(linear())
    with paceline.DataParallel(module, TWO) as wrapper:
        wrapper(integers(7, 3))
        assert module.calls == 1
        assert wrapper.engine == "thread"
        assert "it stays here" in wrapper.engine_reason


class Hiding(Wrapped):
    """Returns a box."""

    def forward(self, x):
        return Box(super().forward(x))


def test_an_output_that_hides_a_graph_is_refused():
    with (
        paceline.DataParallel(Hiding(linear()), TWO, engine="process") as wrapper,
        pytest.raises(TypeError, match="requires a gradient"),
    ):
        wrapper(integers(7, 3))


# ---- what a forward does to gradients -----------------------------------------------


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
def test_a_backward_inside_forward_reaches_all_gradients(
    wrap_by_default, n_wide, is_on
):
    twin = Twin(wrap_by_default, TrainingInside(n_wide, is_on))
    twin.step(step, integers(7, 3))
    for module in modules_of(twin):
        module.is_on = True
    for _ in range(2):
        twin.step(step, integers(7, 3))


def test_processes_refuse_a_backward_inside_forward():
    with (
        paceline.DataParallel(TrainingInside(2, True), TWO, engine="process") as model,
        pytest.raises(RuntimeError, match="runs a backward itself"),
    ):
        model(integers(7, 3))


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
        twin.step(step, integers(7, 3))


class Looking(nn.Module):
    """Has a layer, and looks at it through a weak proxy, which is a part of it too."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.same = weakref.proxy(self.linear)

    def forward(self, x):
        return self.linear(x) + self.same.weight.sum()


def test_a_weak_proxy_of_a_part_is_that_part(wrap_by_default):
    twin = Twin(wrap_by_default, Looking())
    for _ in range(2):
        twin.step(step, integers(7, 3))
