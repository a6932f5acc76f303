"""What users do with autograd itself: grad, hooks, checkpoints, functions, graphs."""

import pytest
import torch
from replicas import (
    Twin,
    assert_same,
    integer_weights,
    integers,
    loss_of,
    net,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---- autograd.grad and backward -----------------------------------------------------

TARGETS = {
    "all parameters": lambda model, x: list(model.parameters()),
    "one parameter": lambda model, x: [next(iter(model.parameters()))],
    "the last parameter": lambda model, x: list(model.parameters())[-1:],
    "the input": lambda model, x: [x],
    "parameters and input": lambda model, x: [x, *model.parameters()],
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_autograd_grad_returns_what_is_asked_for(wrap, target):
    twin = Twin(wrap, net())

    def run(model, x):
        grads = torch.autograd.grad(loss_of(model(x)), target(model, x))
        assert x.grad is None
        return grads

    for _ in range(2):
        assert twin.compare(run, integers(7, 3).requires_grad_())[0] is not None
        assert all(p.grad is None for p in twin.ours.parameters())


def test_autograd_grad_may_stop_at_the_output(wrap):
    twin = Twin(wrap, net())

    def run(model, x):
        out = model(x)
        (slope,) = torch.autograd.grad(loss_of(out.square()), out, retain_graph=True)
        out.backward(slope)
        return slope, x.grad

    twin.compare(run, integers(7, 3).requires_grad_())
    twin.assert_same()


def test_anomaly_detection_changes_nothing(wrap):
    twin = Twin(wrap, net())
    with torch.autograd.set_detect_anomaly(True):
        twin.step(lambda model, x: loss_of(model(x)), integers(7, 3).requires_grad_())


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = integer_weights(nn.Linear(3, 2), 1)
        self.idle = integer_weights(nn.Linear(3, 2), 2)

    def forward(self, x):
        return self.used(x)


def test_autograd_grad_may_allow_unused_parameters(wrap):
    twin = Twin(wrap, Idle())
    x = integers(7, 3)
    mine = twin.compare(
        lambda model, x: torch.autograd.grad(
            loss_of(model(x)), list(model.parameters()), allow_unused=True
        ),
        x,
    )
    assert [grad is None for grad in mine] == [False, False, True, True]
    loss, parameters = loss_of(twin.ours(x)), list(twin.ours.parameters())
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, parameters)
    twin.step(lambda model, x: loss_of(model(x)), x)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_backward_fills_only_the_inputs_named(wrap, target):
    twin = Twin(wrap, net())

    def run(model, x):
        loss_of(model(x)).backward(inputs=target(model, x))
        return x.grad

    twin.compare(run, integers(7, 3).requires_grad_())
    twin.assert_same()
    twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))


def test_backward_takes_the_gradient_of_an_output(wrap):
    twin = Twin(wrap, net())

    def run(model, x):
        out = model(x)
        out.backward(torch.full_like(out, 2))
        return x.grad

    twin.compare(run, integers(7, 3).requires_grad_())
    twin.assert_same()


def test_a_retained_graph_serves_several_backwards(wrap):
    twin = Twin(wrap, net())

    def run(model, x):
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        once = x.grad.clone()
        loss.backward(retain_graph=True)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return once, x.grad, grads

    once, twice, _ = twin.compare(run, integers(7, 3).requires_grad_())
    assert torch.equal(twice, 2 * once)
    twin.assert_same()


def test_a_second_backward_without_retaining_is_an_error(wrap):
    twin = Twin(wrap, net())
    x = integers(7, 3)
    loss = loss_of(twin.ours(x))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    twin.zero()
    twin.step(lambda model, x: loss_of(model(x)), x)


def test_a_weight_changed_before_backward_is_an_error(wrap):
    twin = Twin(wrap, net())
    x = integers(7, 3)
    loss = loss_of(twin.ours(x))
    with torch.no_grad():
        twin.inner[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.no_grad():
        twin.plain[2].weight.add_(1)
    twin.zero()
    twin.step(lambda model, x: loss_of(model(x)), x)


# ---- hooks --------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["hook", "post_accumulate_grad_hook"])
def test_hooks_of_parameters_fire_once_with_the_total(wrap, kind, when):
    plain, module = Idle(), Idle()
    fired = {plain: [], module: []}

    def watch(model):
        for name, p in model.named_parameters():

            def hook(seen, name=name):
                grad = seen if kind == "hook" else seen.grad
                fired[model].append((name, grad.clone()))

            getattr(p, f"register_{kind}")(hook)

    watch(plain)
    if when == "before":
        watch(module)
    ours = wrap(module)
    if when == "after":
        ours(integers(7, 3)).sum()  # a graph without hooks, thrown away
        watch(module)
    for step in range(2):
        x = integers(7, 3, seed=step)
        loss_of(plain(x)).backward()
        loss_of(ours(x)).backward()
    assert len(fired[module]) == 4
    for step in range(2):
        theirs, mine = [
            dict(sorted(fired[model][2 * step : 2 * step + 2]))
            for model in (plain, module)
        ]
        assert_same(mine, theirs)


def test_hooks_of_parameters_may_change_the_gradient(wrap):
    twin = Twin(wrap, net())
    for model in (twin.plain, twin.inner):
        model[0].weight.register_hook(lambda grad: grad.clamp(-20, 20) * 2)
    twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))
    assert twin.inner[0].weight.grad.abs().max() == 40


def test_hooks_of_outputs_and_inputs_see_all_rows(wrap):
    twin = Twin(wrap, net())

    def run(model, x):
        seen = []
        x.register_hook(seen.append)
        out = model(x)
        out.register_hook(lambda grad: seen.append(grad) or 2 * grad)
        out.retain_grad()
        loss_of(out).backward()
        return seen, out.grad, x.grad

    seen, _, _ = twin.compare(run, integers(7, 3).requires_grad_())
    assert [grad.shape for grad in seen] == [(7, 2), (7, 3)]
    twin.assert_same()


# ---- checkpointing ------------------------------------------------------------------

BOTH_KINDS = pytest.mark.parametrize(
    "use_reentrant", [False, True], ids=["saved tensors", "reentrant"]
)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.last = net(1), integer_weights(nn.Linear(2, 2))

    def forward(self, x):
        out = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        out = self.last(out)
        return checkpoint(self.last, out, use_reentrant=self.use_reentrant)


@BOTH_KINDS
def test_checkpoints_inside_the_module_work(wrap, use_reentrant):
    twin = Twin(wrap, Checkpointed(use_reentrant))
    for _ in range(2):
        twin.zero()
        x = integers(7, 3).requires_grad_()
        twin.step(lambda model, x: loss_of(model(x)), x)


@BOTH_KINDS
def test_checkpoints_around_the_wrapper_work(wrap, use_reentrant):
    twin = Twin(wrap, net())

    def loss(model, x):
        out = checkpoint(model, x, use_reentrant=use_reentrant)
        return loss_of(out * checkpoint(model, x + 1, use_reentrant=use_reentrant))

    for _ in range(2):
        twin.zero()
        twin.step(loss, integers(7, 3).requires_grad_())


# ---- functions of one's own ---------------------------------------------------------


class Cube(torch.autograd.Function):
    """Saves its input; and says of its gradient what no formula would."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return ctx.factor * 3 * x**2 * grad + 1, None


class Cubed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, x, factor):
        return Cube.apply(self.linear(x), factor)


def test_functions_of_ones_own_run_in_every_replica(wrap):
    twin = Twin(wrap, Cubed())
    for factor in (2, 3):
        twin.zero()
        x = integers(7, 3).requires_grad_()
        twin.step(lambda model, x, f=factor: loss_of(model(x, f)), x)


# ---- gradients that users keep ------------------------------------------------------


def test_gradients_that_a_user_keeps_do_not_change(wrap):
    ours = wrap(net())
    kept = []
    for step in range(4):
        ours.zero_grad()
        loss_of(ours(integers(7, 3, seed=step))).backward()
        kept += [(p.grad, p.grad.clone()) for p in ours.parameters()]
    x = integers(7, 3).requires_grad_()
    grads = torch.autograd.grad(loss_of(ours(x)), [x, *ours.parameters()])
    kept += [(grad, grad.clone()) for grad in grads]
    ours.zero_grad()
    loss_of(ours(x + 1)).backward()
    for grad, copied in kept:
        assert torch.equal(grad, copied)


def test_a_gradient_in_place_is_added_to_in_place(wrap):
    twin = Twin(wrap, net())
    for model in (twin.plain, twin.inner):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    own = [p.grad for p in twin.inner.parameters()]
    for step in range(2):
        twin.step(lambda model, x: loss_of(model(x)), integers(7, 3, seed=step))
    assert all(p.grad is g for p, g in zip(twin.inner.parameters(), own, strict=True))


def test_gradients_may_be_changed_without_changing_others(wrap):
    """As PCGrad and SAM do: take two gradients, change one, add them."""
    twin = Twin(wrap, net())

    def run(model, x):
        parts = []
        for part in (x[:5], x[2:]):
            model.zero_grad()
            loss_of(model(part)).backward()
            parts.append([p.grad for p in model.parameters()])
        for grad in parts[0]:
            grad.mul_(3)
        for p, *both in zip(model.parameters(), *parts, strict=True):
            p.grad = both[0] + both[1]
        return parts

    twin.compare(run, integers(7, 3))
    twin.assert_same()
