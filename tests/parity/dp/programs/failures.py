"""Failures: the caller gets the plain module's error, and may go on."""

import pytest
import torch
from replicas import (
    bare,
    integer_weights,
    linear,
    loss_of,
    net,
    penalty_on,
    small,
    step,
)
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from programs import X, grown, module, pairs, uses

FAILS = pytest.raises(ArithmeticError, match="on purpose")


def fail(*_):
    raise ArithmeticError("on purpose")


def go_on(model):
    """Take the same steps as with a wrapper that has never failed."""
    for _ in range(2):
        model.zero_grad()
        penalty_on(model, grown()).backward()


class Failing(torch.autograd.Function):
    """Returns its input; its backward fails if `fails`, or at infinity."""

    @staticmethod
    def forward(ctx, x, fails=False):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails or not grad.isfinite().all():
            fail()
        return grad, None


class Second(torch.autograd.Function):
    """A square whose second order fails at a row of 60."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return Failing.apply(2 * x * grad, bool((x == 60).any()))


def breaking(m, x):
    return Failing.apply(m.layer(Second.apply(x)), bool((x == -60).any()))


@uses(
    module(breaking, layer=linear(2)),
    pairs({"[1]": [1], "[6]": [6], "[1, 6]": [1, 6]}, {"first": 1, "second": 2}),
)
def an_error_is_raised_by_the_backward_it_belongs_to(model, rows, order):
    x = small(7, 3)
    x[rows, 0] = -60 if order == 1 else 60
    x.requires_grad_()
    value = loss_of(model(x)) if order == 1 else penalty_on(model, x)
    for create_graph in (True, False):
        with FAILS as caught:
            torch.autograd.grad(value, x, create_graph=create_graph)
    assert any(entry.name == "fail" for entry in caught.traceback)
    go_on(model)


@uses(
    module(
        lambda m, i: Failing.apply(m.a(i)) + m.b(i),
        a=integer_weights(nn.Embedding(5, 3, sparse=True)),
        b=integer_weights(nn.Embedding(5, 3, sparse=True)),
    ),
    [1, 5],
)
def a_backward_that_fails_leaves_no_sparse_gradient_behind(model, row):
    out = model(torch.arange(7) % 5)
    gradient = torch.ones_like(out)
    gradient[row] = float("inf")
    with FAILS:
        out.backward(gradient)
    model.zero_grad()
    step(model, torch.arange(7) % 5).backward()
    for p in model.parameters():
        p.grad = p.grad.to_dense()


PLACES = {
    "parameter": lambda model, x: bare(model).weight.register_hook(fail),
    "sum": lambda model, x: bare(model).bias.register_post_accumulate_grad_hook(fail),
    "input": lambda model, x: x.register_hook(fail),
    "wrapper before": lambda model, x: model.register_forward_pre_hook(fail),
    "wrapper after": lambda model, x: model.register_forward_hook(fail),
    "wrapper backward": lambda model, x: model.register_full_backward_hook(fail),
    "packs": lambda model, x: saved_tensors_hooks(fail, fail),
    "unpacks": lambda model, x: saved_tensors_hooks(lambda tensor: tensor, fail),
}


@uses(linear, PLACES)
def what_a_hook_raises_is_raised(model, register):
    x = grown()
    with FAILS, register(model, x):
        step(model, x).backward()
    go_on(model)


@uses(module(lambda m, x: checkpoint(m.layers, x, use_reentrant=False), layers=net()))
def hooks_on_saved_tensors_may_be_forbidden(model):
    with disable_saved_tensors_hooks("none"), pytest.raises(RuntimeError, match="none"):
        model(X)
    go_on(model)


@uses(module(lambda m, x: checkpoint(m.layers, x, use_reentrant=True), layers=net()))
def reentrant_checkpoints_have_no_second_order(model, x):
    with pytest.raises(RuntimeError, match="use_reentrant"):
        torch.autograd.grad(step(model, x), x, create_graph=True)
    step(model, x).backward()
