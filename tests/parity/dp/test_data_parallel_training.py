"""Whole trainings, compared step by step with the plain module; and leaks."""

import gc
import math
import weakref

import pytest
import torch
from programs import X, module, parameter
from replicas import (
    ON_EACH,
    Power,
    Twin,
    linear,
    loss_of,
    reals,
    resident_bytes,
    slopes_of,
    small,
    smooth_net,
    without_collector,
)
from support.threads import IS_FREE_THREADED
from support.waiting import once_collected
from torch import nn

N_STEPS = 10
# A rounding difference grows with the steps; Adam divides by small numbers.
GROWN = 1e-9


def near(mine, theirs, limit=GROWN):
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=limit, atol=limit)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


OPTIMIZERS = {
    "SGD": sgd,
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("n", [2, 3])
def test_trainings_go_the_plain_way(wrap, make, n):
    """With evaluations between steps, clipped gradients, both ways to clear them."""
    twin = Twin(wrap, smooth_net(), n)
    optimizers = [make(model.parameters()) for model in twin.models]
    for step in range(N_STEPS):
        x, target = reals(7 + step % 3, 3, seed=step), reals(7 + step % 3, 2, seed=step)
        seen = []
        for model, optimizer in zip(twin.models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=n == 2)
            loss = (10 * model(x) - target).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                seen.append(torch.stack([loss, norm, model.eval()(x).sum()]))
            model.train()
        torch.testing.assert_close(seen[1], seen[0], rtol=GROWN, atol=GROWN)
        near(twin.ours, twin.plain)
        nn.utils.clip_grad_value_(twin.inner.parameters(), 0.01)
    assert (twin.inner[0].weight != smooth_net()[0].weight).all()


# ---- leaks --------------------------------------------------------------------------


def heavy(m, x):
    """Keep about 2.5 MiB for the backward of a call."""
    y = x * m.weight
    for _ in range(4):
        y = y.tanh()
    return y.sum(1)


# Their graphs would be 150 MB; what allocators keep is less.
N_GRAPHS, MOST_BYTES = 60, 60e6


def fail(ours, x):
    loss = ours(x).sum()
    loss.register_hook(lambda grad: grad.no_gradient_today)
    with pytest.raises(AttributeError, match="no_gradient_today"):
        loss.backward()


ENDS = {
    "abandon": lambda ours, x: ours(x) is None,
    "keep one": lambda ours, x: setattr(ours, "kept", ours(x)),
    "fail": fail,
    "retain": lambda ours, x: ours(x).sum().backward(retain_graph=True),
    "differentiate": lambda ours, x: torch.autograd.grad(
        ours(x).sum(), [ours.module.weight]
    ),
    "train": lambda ours, x: (ours.zero_grad(), ours(x).sum().backward()),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@ON_EACH
def test_graphs_leave_no_memory_behind(wrap, end):
    ours = wrap(module(heavy, weight=parameter(torch.ones(1024))))
    x = torch.ones(128, 1024)
    for _ in range(10):
        end(ours, x)
    before = resident_bytes()
    for _ in range(N_GRAPHS):
        end(ours, x)
    assert resident_bytes() - before < MOST_BYTES


class Token:
    """Lives as long as the graph node that holds it."""


@ON_EACH
def test_outputs_and_graphs_are_freed_at_once(wrap):
    """By reference counts alone: the collector is off."""
    ours = wrap(smooth_net())
    x = reals(7, 3)
    ours(x)
    with without_collector():
        out = ours(x)
        out.grad_fn.metadata["token"] = Token()
        watched = weakref.ref(out.grad_fn.metadata["token"]), weakref.ref(out)
        loss = loss_of(out)
        del out
        loss.backward()
        del loss
        assert [ref() for ref in watched] == [None, None]
        loss_of(ours(x)).backward()
        ours(x)
        # Without a GIL, what a thread has made stays until it runs Python again.
        assert gc.collect() == 0 or IS_FREE_THREADED


alive = weakref.WeakSet()


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark = torch.zeros(0)
        alive.add(ctx.mark)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mark.new_ones(())


def counting(m, x):
    """Return with each row how many graphs are alive."""
    return m.power(Held.apply(x) + x), torch.full((len(x), 1), float(len(alive)))


@ON_EACH
def test_graphs_of_gradients_are_freed_with_the_callers(wrap):
    ours, counts = wrap(module(counting, power=Power())), []
    for step in range(5):
        x = small(4, 3, seed=step).requires_grad_()
        out, count = ours(x)
        counts.append(count[-1].item())
        slope, value = x, loss_of(out)
        for _ in range(step):  # some orders are thrown away
            (slope,) = slopes_of(value, [x])
            value = slope.square().sum()
        if step % 2:
            value.backward()
        del out, count, slope, value, x
    # A thread of torch may still hold its last result for a moment.
    most = math.inf if IS_FREE_THREADED else 4 if wrap.is_gpu else 2
    assert max(counts) <= most, counts


@ON_EACH
def test_a_graph_that_a_forward_records_alone_is_freed_with_its_output(wrap):
    def records(m, x):
        seen.append(weakref.ref(m.layer.weight))
        with torch.enable_grad():
            return m.layer(x)

    seen = []
    ours = wrap(module(records, layer=linear()))
    with torch.no_grad():
        for _ in range(3):
            ours(X)
    assert once_collected(  # two are the module's own
        lambda: sum(each() is not None for each in seen[:-2]) == 2
    )
