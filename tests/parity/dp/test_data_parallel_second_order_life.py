"""Gradients of gradients: their hooks, how long graphs live, and failures."""

import weakref

import pytest
import torch
from replicas import (
    Power,
    Twin,
    assert_same,
    integer_weights,
    loss_of,
    slopes_of,
    small,
    squares_of,
)
from torch import nn

# ---- hooks --------------------------------------------------------------------------


def test_hooks_of_parameters_see_totals_with_a_graph(wrap):
    twin = Twin(wrap, Power())
    fired = {}
    for model in (twin.plain, twin.inner):
        fired[model] = []
        for name, p in model.named_parameters():

            def hook(grad, p=p, name=name, seen=fired[model]):
                seen.append((name, grad.detach().clone(), grad.requires_grad))
                return grad * p  # which adds to the graph

            p.register_hook(hook)

    def run(model, x):
        weights = list(model.parameters())[:2]
        slopes = slopes_of(loss_of(model(x)), weights)
        squares_of(slopes).backward()
        return slopes, x.grad

    for _ in range(2):
        twin.zero()
        twin.compare(run, small(7, 3).requires_grad_())
        twin.assert_same()
    by_name = [
        {name: [row[1:] for row in rows if row[0] == name] for name, _, _ in rows}
        for rows in (fired[twin.inner], fired[twin.plain])
    ]
    assert len(by_name[0]["first.weight"]) == 4
    assert by_name[0].keys() == by_name[1].keys()
    for name, rows in by_name[0].items():
        assert_same(rows, by_name[1][name], name)


# ---- the life of graphs -------------------------------------------------------------


def test_graphs_of_gradients_may_be_retained(wrap):
    twin = Twin(wrap, Power())

    def run(model, x):
        (slope,) = slopes_of(loss_of(model(x)), [x])
        first = torch.autograd.grad(slope.sum(), x, retain_graph=True)
        second = torch.autograd.grad(squares_of([slope]), x, retain_graph=True)
        (third,) = slopes_of(slope.sum(), [x])
        squares_of([slope, third]).backward()
        return first, second, third, x.grad

    twin.compare(run, small(7, 3).requires_grad_())
    twin.assert_same()


def test_a_second_backward_of_a_gradient_is_an_error(wrap):
    twin = Twin(wrap, Power())
    x = small(7, 3).requires_grad_()
    (slope,) = slopes_of(loss_of(twin.ours(x)), [x])
    penalty = squares_of([slope])
    penalty.backward()
    with pytest.raises(RuntimeError, match="second time"):
        penalty.backward()
    twin.zero()
    twin.step(lambda model, x: loss_of(model(x)), x)


def test_a_weight_changed_before_the_second_order_is_an_error(wrap):
    twin = Twin(wrap, Power())
    x = small(7, 3).requires_grad_()
    (slope,) = slopes_of(loss_of(twin.ours(x)), [x])
    penalty = squares_of([slope])
    with torch.no_grad():
        twin.inner.last.weight.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()
    twin.zero()
    twin.step(lambda model, x: loss_of(model(x)), x)


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


class Counting(nn.Module):
    """Tells with each row how many of its graphs are alive in its process."""

    def __init__(self):
        super().__init__()
        self.power = Power()

    def forward(self, x):
        count = torch.full((len(x), 1), float(len(alive)))
        return self.power(Held.apply(x) + x), count


def test_graphs_of_gradients_are_freed_with_the_callers(wrap):
    ours = wrap(Counting())
    counts = []
    for step in range(5):
        x = small(4, 3, seed=step).requires_grad_()
        out, count = ours(x)
        counts.append(count[-1].item())
        slope = x
        value = loss_of(out)
        for _ in range(step):  # orders of which some are thrown away
            (slope,) = slopes_of(value, [x])
            value = squares_of([slope])
        if step % 2:
            value.backward()
        del out, count, slope, value, x
    assert max(counts) <= 2, counts  # threads count those of both replicas


# ---- failures -----------------------------------------------------------------------


class Broken(torch.autograd.Function):
    """Passes on what it gets; its backward fails if it is told to."""

    @staticmethod
    def forward(ctx, x, is_broken):
        ctx.is_broken = is_broken
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.is_broken:
            raise ArithmeticError("this is broken")
        return grad, None


class Fragile(torch.autograd.Function):
    """A square, of which a row of 60 breaks the second order."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return Broken.apply(2 * x * grad, bool((x == 60).any()))


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, x):
        out = self.linear(Fragile.apply(x))
        return Broken.apply(out, bool((x == -60).any()))


def penalised(model, x):
    (slope,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
    return squares_of([slope])


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("rows", [[1], [6], [1, 6]], ids=str)
def test_an_error_is_raised_by_the_backward_it_belongs_to(wrap, rows, order):
    twin = Twin(wrap, Breaking())
    x = small(7, 3)
    x[rows, 0] = -60 if order == 1 else 60
    x.requires_grad_()
    value = loss_of(twin.ours(x)) if order == 1 else penalised(twin.ours, x)
    with pytest.raises(ArithmeticError, match="this is broken"):
        torch.autograd.grad(value, x, create_graph=True)
    with pytest.raises(ArithmeticError, match="this is broken"):
        torch.autograd.grad(value, x)
    for _ in range(2):
        twin.zero()
        twin.step(penalised, small(7, 3).requires_grad_())


class Unasked(nn.Module):
    """Has a weight whose gradient cannot be taken."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(small(2, 3))

    def forward(self, x):
        return nn.functional.linear(x.square(), Broken.apply(self.weight, True))


def test_what_nobody_asks_for_is_not_computed(wrap):
    twin = Twin(wrap, Unasked())
    for _ in range(2):
        twin.compare(
            lambda model, x: slopes_of(penalised(model, x), [x]),
            small(7, 3).requires_grad_(),
        )
