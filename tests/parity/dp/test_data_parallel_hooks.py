"""Hooks of every kind, checkpoints, hooks on saved tensors, graphs left half-way."""

import gc
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
from replicas import (
    Twin,
    assert_same,
    assert_same_grads,
    integer_weights,
    integers,
    loss_of,
    net,
    step,
)
from torch import nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

KINDS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved", "again"])


class OwnError(Exception):
    """Raised by hooks of this file."""


def fail(*_):
    raise OwnError("on purpose")


# ---- modules ------------------------------------------------------------------------


def test_hooks_of_the_wrapper_see_the_whole_batch(wrap):
    twin = Twin(wrap, net())
    seen = {model: [] for model in twin.models}

    def before(model, args, kwargs):
        seen[model].append(args[0].clone())
        return (args[0] * 2,), kwargs

    def after(model, args, kwargs, out):
        seen[model].append(out.detach().clone())
        return out + 1

    def backward_before(model, grads):
        seen[model].append(grads[0].clone())
        return (grads[0] * 3,)

    def backward(model, grads, of_outputs):
        seen[model] += [grads[0].clone(), of_outputs[0].clone()]

    for model in twin.models:
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, with_kwargs=True)
        model.register_full_backward_pre_hook(backward_before)
        model.register_full_backward_hook(backward)
    for seed in range(2):
        twin.zero()
        twin.step(step, integers(7, 3, seed=seed).requires_grad_())
    assert len(seen[twin.ours]) == 10
    assert_same(seen[twin.ours], seen[twin.plain])


@pytest.mark.parametrize(
    "kind",
    [
        "forward_hook",
        "forward_pre_hook",
        "full_backward_hook",
        "full_backward_pre_hook",
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_parts_run_in_every_replica(wrap, kind, when):
    twin = Twin(wrap, net())
    if when == "after":
        twin.step(step, integers(7, 3))
        twin.zero()
    rows = []
    register = getattr(twin.inner[2], f"register_{kind}")
    handle = register(lambda module, seen, *_: rows.append(len(seen[0])))
    twin.step(step, integers(7, 3).requires_grad_())
    assert sorted(rows) == [3, 4]
    handle.remove()
    twin.zero()
    twin.step(step, integers(7, 3))


class Late(nn.Module):
    """Registers a hook in its first forward, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.layer, self.is_hooked = integer_weights(nn.Linear(3, 2)), False

    def forward(self, x):
        seen = []
        if not self.is_hooked:
            self.layer.register_forward_hook(lambda m, a, out: m.seen.append(out))
            self.is_hooked = True
        self.layer.seen = seen
        out = self.layer(x)
        assert len(seen) == 1, "hooks of another replica ran too"
        return out


def test_hooks_of_parts_may_change_values(wrap):
    twin = Twin(wrap, net())
    for module in (twin.plain, twin.inner):
        module[0].register_forward_hook(lambda m, args, out: out * m.weight.sum())
        module[1].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,))
        module[2].register_forward_pre_hook(lambda m, args: (args[0] - m.bias.sum(),))
    for seed in range(2):
        twin.step(step, integers(7, 3, seed=seed))


def test_hooks_that_a_replica_registers_are_its_own(wrap):
    twin = Twin(wrap, Late())
    for _ in range(3):
        twin.step(step, integers(7, 3))
    assert [len(m.layer._forward_hooks) for m in (twin.plain, twin.inner)] == [1, 1]


# ---- parameters and tensors ---------------------------------------------------------


def test_hooks_for_several_gradients_see_the_totals(wrap):
    twin = Twin(wrap, net())
    seen = ([], [])
    handles = [
        torch.autograd.graph.register_multi_grad_hook(
            list(module.parameters()),
            lambda grads, s=s: s.append([*map(torch.clone, grads)]),
        )
        for module, s in zip((twin.plain, twin.inner), seen, strict=True)
    ]
    for seed in range(2):
        twin.step(step, integers(7, 3, seed=seed))
    for handle in handles:
        handle.remove()
    assert len(seen[0]) == 2
    assert_same(seen[1], seen[0])


def test_an_optimizer_may_step_inside_backward(wrap):
    """As torch's recipe to save the memory of gradients does."""
    twin = Twin(wrap, net())
    for module in (twin.plain, twin.inner):
        for p in module.parameters():
            optimizer = torch.optim.SGD([p], lr=1.0)

            def take(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(take)
    for seed in range(3):
        for model in twin.models:
            loss_of(model(integers(7, 3, seed=seed, low=-1, high=1))).backward()
        twin.assert_same()
        assert all(p.grad is None for p in twin.inner.parameters())


def test_a_hook_may_call_the_wrapper(wrap):
    twin = Twin(wrap, net())
    other = integers(5, 3, seed=3)
    seen = ([], [])

    def loss(model, x):
        kept = seen[model is twin.ours]
        x.register_hook(lambda _: kept.append(model(other).detach()))
        return loss_of(model(x))

    for module, model, kept in zip(twin_modules(twin), twin.models, seen, strict=True):
        module[0].weight.register_hook(
            lambda _, model=model, kept=kept: kept.append(model(other).detach())
        )
    for _ in range(2):
        twin.step(loss, integers(7, 3).requires_grad_())
    assert len(seen[0]) == 4
    assert_same(seen[1], seen[0])


def twin_modules(twin):
    return twin.plain, twin.inner


class Watching(nn.Module):
    """Hooks a tensor in forward; the hook fails for a row that begins with 99."""

    def __init__(self):
        super().__init__()
        self.layer = integer_weights(nn.Linear(3, 2))

    def forward(self, x):
        y = self.layer(x)
        fails = bool((x[:, 0] == 99).any())
        y.register_hook(lambda grad: fail() if fails else grad * 2)
        return y.square()


PLACES = OrderedDict(
    {
        "parameter": lambda twin, x: twin.inner.layer.weight.register_hook(fail),
        "sum": lambda twin, x: twin.inner.layer.bias.register_post_accumulate_grad_hook(
            fail
        ),
        "input": lambda twin, x: x.register_hook(fail),
        "wrapper before": lambda twin, x: twin.ours.register_forward_pre_hook(fail),
        "wrapper after": lambda twin, x: twin.ours.register_forward_hook(fail),
        "wrapper backward": lambda twin, x: twin.ours.register_full_backward_hook(fail),
    }
)


def test_what_a_hook_raises_is_raised_and_the_next_call_works(wrap):
    twin = Twin(wrap, Watching())
    twin.step(step, integers(7, 3))
    for place, register in PLACES.items():
        x = integers(7, 3).requires_grad_()
        handle = register(twin, x)
        with pytest.raises(OwnError, match="on purpose"):
            step(twin.ours, x).backward()
        handle.remove()
        twin.zero()
        twin.step(step, integers(7, 3, seed=len(place)).requires_grad_())
    for row in (0, 6):  # of replica 0, and of the other one
        x = integers(7, 3)
        x[row, 0] = 99
        loss = step(twin.ours, x)
        with pytest.raises(OwnError, match="on purpose"):
            loss.backward()
        twin.zero()
        twin.step(step, integers(7, 3, seed=row))


class Heads(nn.Module):
    """Two outputs, each of weights of its own."""

    def __init__(self):
        super().__init__()
        self.body = integer_weights(nn.Linear(3, 4), 1)
        self.left = integer_weights(nn.Linear(4, 2), 2)
        self.right = integer_weights(nn.Linear(4, 2), 3)

    def forward(self, x):
        hidden = self.body(x)
        return self.left(hidden), self.right(hidden)


@pytest.mark.parametrize("create_graph", [False, True], ids=["first", "recorded"])
def test_hooks_get_a_tensor_where_the_loss_leaves_out_an_output(wrap, create_graph):
    twin = Twin(wrap, Heads())
    for model in (twin.plain, twin.inner):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * 2)
    grads = []
    for model, inner in ((twin.plain, twin.plain), (twin.ours, twin.inner)):
        loss = loss_of(model(integers(7, 3))[0])
        some = [*inner.body.parameters(), *inner.left.parameters()]
        grads.append(torch.autograd.grad(loss, some, create_graph=create_graph))
        loss = loss_of(model(integers(7, 3))[0])
        loss.backward()
        grads[-1] += tuple(p.grad for p in some)
        idle = [p.grad for p in inner.right.parameters()]
        assert all(grad is None or not grad.any() for grad in idle)
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


# ---- checkpoints --------------------------------------------------------------------


class Twice(nn.Module):
    """Checkpoints inside a checkpoint, with dropout between."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.options = {"use_reentrant": use_reentrant}
        self.layer, self.drop = integer_weights(nn.Linear(3, 3)), nn.Dropout(0.5)
        self.saves_memory = True

    def block(self, x):
        return self.drop(self.layer(x)).square()

    def middle(self, x):
        return self.keep(self.block, x) + x

    def keep(self, function, x):
        return (
            checkpoint(function, x, **self.options)
            if self.saves_memory
            else function(x)
        )

    def forward(self, x):
        return self.keep(self.middle, x)


@KINDS
def test_checkpoints_in_checkpoints_repeat_the_random_numbers(wrap, use_reentrant):
    ours = wrap(Twice(use_reentrant))
    results = []
    for saves_memory in (True, False):
        ours.module.saves_memory = saves_memory
        ours.zero_grad()
        torch.manual_seed(5)
        x = integers(7, 3).requires_grad_()
        out = ours(x)
        loss_of(out).backward()
        grads = [p.grad for p in ours.parameters()]
        results.append([out.detach(), x.grad, *grads])
    assert_same(results[0], results[1])


OPTIONS = (
    {"determinism_check": "none"},
    {"preserve_rng_state": False},
    {"context_fn": checkpoints.noop_context_fn},
)


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.options = net(), {}

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False, **self.options)


def test_checkpoints_may_have_options_inside_and_around(wrap):
    twin = Twin(wrap, Optional())

    def around(model, x):
        return loss_of(checkpoint(model, x, use_reentrant=False, **options))

    for options in OPTIONS:
        twin.plain.options = twin.inner.options = {}
        twin.step(around, integers(7, 3))
        twin.plain.options = twin.inner.options = options
        twin.step(step, integers(7, 3))
    with checkpoints.set_checkpoint_early_stop(False):
        twin.step(step, integers(7, 3))


@KINDS
def test_checkpoints_around_may_be_nested_and_asked_twice(wrap, use_reentrant):
    twin = Twin(wrap, net())

    def outer(model, x):
        def inner(x):
            return checkpoint(model, x, use_reentrant=use_reentrant) * 2

        loss = loss_of(checkpoint(inner, x, use_reentrant=use_reentrant))
        if not use_reentrant:
            loss.backward(retain_graph=True)
        return loss

    for _ in range(2):
        twin.zero()
        twin.step(outer, integers(7, 3).requires_grad_())


# ---- hooks on saved tensors ---------------------------------------------------------


def test_hooks_on_saved_tensors_round_a_call_change_nothing(wrap):
    """All replicas save under them on the CPU; on GPUs replica 0 alone does."""
    twin = Twin(wrap, net())
    packed = {model: [] for model in twin.models}

    def loss(model, x):
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed[model].append(t.shape) or t, lambda t: t
        )
        with torch.autograd.graph.save_on_cpu(), hooks:
            out = model(x)
        return loss_of(out)

    twin.step(loss, integers(7, 3).requires_grad_())
    n = len(packed[twin.plain])
    assert len(packed[twin.ours]) == (n if wrap.is_gpu else 2 * n)


@pytest.mark.parametrize("which", ["pack", "unpack"])
def test_what_a_hook_on_saved_tensors_raises_is_raised(wrap, which):
    twin = Twin(wrap, net())
    hooks = (fail, fail) if which == "pack" else (lambda t: t, fail)

    def run():
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            out = twin.ours(integers(7, 3))
        loss_of(out).backward()

    with pytest.raises(OwnError, match="on purpose"):
        run()
    twin.zero()
    twin.step(step, integers(7, 3))


def test_hooks_on_saved_tensors_may_be_forbidden(wrap):
    twin = Twin(wrap, Optional())
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("none of these"),
        pytest.raises(RuntimeError, match="none of these"),
    ):
        twin.ours(integers(7, 3))
    twin.step(step, integers(7, 3))


# ---- graphs left half-way -----------------------------------------------------------


def test_graphs_may_be_left_half_way(wrap):
    twin = Twin(wrap, net())

    def losses():
        for seed in range(5):
            yield loss_of(twin.ours(integers(7, 3, seed=seed)))

    twin.ours(integers(7, 3))  # an output dropped
    loss_of(twin.ours(integers(7, 3)))  # a loss dropped
    try:
        kept = loss_of(twin.ours(integers(7, 3)))
        raise OwnError
    except OwnError:
        del kept
    steps = losses()
    next(steps)
    last = next(steps)
    steps.close()
    last.backward()
    loss_of(twin.plain(integers(7, 3, seed=1))).backward()
    twin.assert_same()
    twin.zero()
    twin.step(step, integers(7, 3, seed=9))


def test_a_graph_outlives_its_wrapper(wrap):
    twin = Twin(wrap, net())
    x = integers(7, 3)
    losses = [loss_of(twin.ours(x + i)) for i in range(3)]
    losses.pop(0).backward()
    gone = weakref.ref(twin.ours)
    del twin.ours
    gc.collect()
    assert gone() is None
    losses.pop(0).backward()
    losses.pop().backward()
    for i in range(3):
        loss_of(twin.plain(x + i)).backward()
    assert_same_grads(twin.inner, twin.plain)


def test_one_backward_may_go_through_two_wrappers_in_a_thread(wrap):
    twins = [Twin(wrap, net()), Twin(wrap, net(1))]
    for side in range(2):
        first, second = [
            loss_of(twin.models[side](integers(7 - 2 * i, 3)))
            for i, twin in enumerate(twins)
        ]
        total = first + 2 * second
        thread = threading.Thread(target=total.backward)
        thread.start()
        thread.join()
    for twin in twins:
        twin.assert_same()


class Carrying(nn.Module):
    """Raises an exception that holds a tensor of the graph."""

    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x):
        out = self.layers(x)
        if (x[:, 0] == 99).any():
            raise CarriedError(out)
        return out


class CarriedError(Exception):
    def __init__(self, tensor):
        super().__init__("too large")
        self.tensor = tensor


@pytest.mark.parametrize("row", [0, 6])
def test_an_exception_may_hold_a_tensor_of_the_graph(wrap, row):
    twin = Twin(wrap, Carrying())
    x = integers(7, 3)
    x[row, 0] = 99
    with pytest.raises(CarriedError, match="too large") as caught:
        twin.ours(x)
    rows = slice(0, 4) if row == 0 else slice(4, 7)
    assert torch.equal(caught.value.tensor, twin.plain.layers(x[rows]))
    twin.step(step, integers(7, 3))
