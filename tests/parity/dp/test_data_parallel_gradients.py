"""Where gradients arrive: parameters of every kind, calls in every order."""

import copy
import threading

import pytest
import torch
from replicas import (
    Twin,
    assert_close,
    assert_same_grads,
    integer_weights,
    integers,
    leaf,
    loss_of,
    net,
    reals,
    smooth_net,
)
from torch import nn


def test_gradients_of_inexact_numbers_agree_closely(wrap):
    twin = Twin(wrap, smooth_net())
    x = reals(7, 3).requires_grad_()
    twin.compare(lambda model, x: model(x), x, exact=False)
    twin.step(lambda model, x: model(x).exp().mean(), x, exact=False)


# ---- parameters ---------------------------------------------------------------------


class Tied(nn.Module):
    """Uses one weight in two layers, under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        integer_weights(self)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).relu())


def test_tied_weights_get_the_sum_of_their_uses(wrap):
    twin = Twin(wrap, Tied())
    twin.step(lambda model, x: loss_of(model(x)), integers(7, 3).requires_grad_())
    assert twin.inner.second.weight is twin.inner.first.weight


class Partly(nn.Module):
    """Uses `always` in every row, `rarely` only where a row asks for it."""

    def __init__(self):
        super().__init__()
        self.always = integer_weights(nn.Linear(3, 2), 1)
        self.rarely = integer_weights(nn.Linear(3, 2), 2)
        self.never = integer_weights(nn.Linear(3, 2), 3)

    def forward(self, x):
        out = self.always(x)
        asks = x[:, :1] > 50
        if asks.any():
            out = out + asks * self.rarely(x)
        return out


@pytest.mark.parametrize("rows", [[], [1], [6], [1, 6]], ids=str)
def test_unused_parameters_keep_no_gradient(wrap, rows):
    twin = Twin(wrap, Partly())
    x = integers(7, 3)
    x[rows, 0] = 60
    for _ in range(2):  # and the use of one step says nothing of the next
        twin.zero()
        twin.step(lambda model, x: loss_of(model(x)), x)
        assert twin.inner.never.weight.grad is None
        assert (twin.inner.rarely.weight.grad is None) == (not rows)


def test_a_parameter_may_be_used_in_some_steps_only(wrap):
    twin = Twin(wrap, Partly())
    for row in (None, 1, 6, None, 6, 1):
        twin.zero()
        x = integers(7, 3)
        if row is not None:
            x[row, 0] = 60
        twin.step(lambda model, x: loss_of(model(x)), x)


class Assorted(nn.Module):
    """Parameters in every place that torch knows, frozen ones among them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.several = nn.ParameterList([integers(3, seed=s) for s in (1, 2)])
        self.named = nn.ParameterDict({"shift": integers(3, seed=3)})
        self.frozen = nn.Parameter(integers(3, seed=4), requires_grad=False)
        self.turned = nn.Parameter(integers(3, 2, seed=5).T)
        self.register_buffer("fixed", integers(3, seed=6))

    def forward(self, x):
        x = x * self.scale * self.several[0] + self.several[1] + self.named["shift"]
        x = torch.cat([x, self.empty]) * self.frozen + self.fixed
        return nn.functional.linear(x, self.turned)


def test_parameters_in_every_place_get_gradients(wrap):
    twin = Twin(wrap, Assorted())
    twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))
    assert twin.inner.frozen.grad is None


class Moving(nn.Module):
    """Learns a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))
        self.register_buffer("moving", integers(3).requires_grad_())

    def forward(self, x):
        return self.linear(x * self.moving)


def test_buffers_that_require_a_gradient_get_it(wrap):
    twin = Twin(wrap, Moving())
    x = integers(7, 3)
    twin.step(lambda model, x: loss_of(model(x)), x)
    assert_close(twin.inner.moving.grad, twin.plain.moving.grad)
    assert twin.inner.moving.grad is not None


def test_a_module_without_parameters_passes_gradients_on(wrap):
    twin = Twin(wrap, nn.Softplus())
    twin.step(
        lambda model, x: model(x).sum(), reals(7, 3).requires_grad_(), exact=False
    )


# ---- optimizers ---------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_may_be_made_before_or_after(wrap, when):
    plain, module = net(), net()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.25)
    if when == "before":
        mine = torch.optim.SGD(module.parameters(), lr=0.25)
        ours = wrap(module)
    else:
        ours = wrap(module)
        mine = torch.optim.SGD(ours.parameters(), lr=0.25)
    for step in range(3):
        x = integers(7, 3, seed=step, low=-1, high=1)
        for model, optimizer in ((plain, theirs), (ours, mine)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        assert_same_grads(ours, plain, f"step {step}")
    assert not torch.equal(plain[0].weight, net()[0].weight)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_zeroed_in_both_ways(wrap, set_to_none):
    twin = Twin(wrap, net())
    for step in range(3):
        twin.zero(set_to_none=set_to_none)
        twin.assert_same()
        twin.step(lambda model, x: loss_of(model(x)), integers(7, 3, seed=step))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up_over_backwards(wrap, set_to_none):
    twin = Twin(wrap, Partly())
    for step in range(6):
        if step == 3:
            twin.zero(set_to_none=set_to_none)
        x = integers(7, 3, seed=step)
        x[step, 0] = 60 * (step % 2)
        twin.step(lambda model, x: loss_of(model(x)), x)


# ---- the order of calls -------------------------------------------------------------


def test_two_forwards_may_go_into_one_backward(wrap):
    twin = Twin(wrap, net())
    a, b = integers(7, 3).requires_grad_(), integers(5, 3, seed=1).requires_grad_()
    twin.step(lambda model, a, b: loss_of(model(a)) + 2 * loss_of(model(b)), a, b)
    twin.step(lambda model, a: loss_of(model(a[:, :3]) * model(a)), a)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_backwards_may_come_in_any_order(wrap, order):
    twin = Twin(wrap, net())
    batches = [integers(7, 3, seed=s).requires_grad_() for s in range(3)]

    def run(model, *own):
        losses = [loss_of(model(x)) for x in own]
        for i in order:
            losses[i].backward()
        return [x.grad for x in own]

    twin.compare(run, *batches)
    twin.assert_same()


def test_a_forward_without_gradients_may_come_between(wrap):
    twin = Twin(wrap, net())

    def run(model, x):
        loss = loss_of(model(x))
        with torch.no_grad():
            model(x[:5] + 1)
        abandoned = model(x + 2)
        loss.backward()
        return x.grad, abandoned.detach()

    twin.compare(run, integers(7, 3).requires_grad_())
    twin.assert_same()


def test_backward_may_run_in_another_thread(wrap):
    twin = Twin(wrap, net())

    def run(model, x):
        loss = loss_of(model(x))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return x.grad

    for _ in range(2):
        assert twin.compare(run, integers(7, 3).requires_grad_()) is not None
        twin.assert_same()


def test_forward_may_run_in_another_thread(wrap):
    twin = Twin(wrap, net())

    def run(model, x):
        losses = []
        thread = threading.Thread(target=lambda: losses.append(loss_of(model(x))))
        thread.start()
        thread.join()
        losses[0].backward()
        return x.grad

    assert twin.compare(run, integers(7, 3).requires_grad_()) is not None
    twin.assert_same()


# ---- wrappers among other modules ---------------------------------------------------


def test_wrappers_may_be_chained(wrap):
    modules = [integer_weights(nn.Linear(3, 3), s) for s in (1, 2, 3)]
    plain = nn.Sequential(*modules)
    pairs = zip(modules, (2, 3, 2), strict=True)
    ours = nn.Sequential(*[wrap(copy.deepcopy(module), n) for module, n in pairs])
    for step in range(2):
        x, y = [integers(7, 3, seed=step).requires_grad_() for _ in range(2)]
        loss_of(plain(x)).backward()
        loss_of(ours(y)).backward()
        assert_close(y.grad, x.grad)
        assert_same_grads(ours, plain)


class Larger(nn.Module):
    """A wrapper between two layers, one of which it shares with the inside."""

    def __init__(self, inner, shared):
        super().__init__()
        self.shared = shared
        self.inner = inner
        self.head = integer_weights(nn.Linear(2, 1), 5)

    def forward(self, x):
        return self.head(self.inner(self.shared(x)).relu())


class Inner(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared
        self.out = integer_weights(nn.Linear(3, 2), 4)

    def forward(self, x):
        return self.out(self.shared(x))


@pytest.mark.parametrize("is_shared", [False, True], ids=["apart", "shared"])
def test_a_wrapper_works_inside_a_larger_model(wrap, is_shared):
    def build():
        shared, other = [integer_weights(nn.Linear(3, 3), s) for s in (1, 2)]
        return Larger(Inner(shared if is_shared else other), shared)

    plain, ours = build(), build()
    inner = ours.inner
    ours.inner = wrap(inner)
    for step in range(2):
        x, y = [integers(7, 3, seed=step).requires_grad_() for _ in range(2)]
        loss_of(plain(x)).backward()
        loss_of(ours(y)).backward()
        assert_close(y.grad, x.grad)
        assert_same_grads(inner, plain.inner)
        assert_same_grads(ours.head, plain.head)
        assert_same_grads(ours.shared, plain.shared)
    assert (inner.shared is ours.shared) == is_shared


def test_the_bare_module_may_be_used_beside_its_wrapper(wrap):
    twin = Twin(wrap, net())
    x = integers(7, 3)
    (loss_of(twin.plain(x)) + loss_of(twin.plain(x + 1))).backward()
    (loss_of(twin.ours(x)) + loss_of(twin.inner(x + 1))).backward()
    twin.assert_same()


def test_two_wrappers_of_one_module_share_its_weights(wrap):
    twin = Twin(wrap, net())
    other = wrap(twin.inner, 3)
    x = integers(7, 3)
    for step in range(2):
        (loss_of(twin.plain(x)) + loss_of(twin.plain(x + 1))).backward()
        (loss_of(twin.ours(x)) + loss_of(other(x + 1))).backward()
        twin.assert_same()
        with torch.no_grad():
            for model in (twin.plain, twin.inner):
                for p in model.parameters():
                    p.add_(step + 1)


def test_the_wrapped_module_trains_on_when_its_wrapper_is_gone(wrap):
    twin = Twin(wrap, net())
    x = integers(7, 3)
    twin.step(lambda model, x: loss_of(model(x)), x)
    del twin.ours
    for model in (twin.plain, twin.inner):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model.zero_grad()
        loss_of(model(leaf(x))).backward()
        optimizer.step()
    assert_same_grads(twin.inner, twin.plain)
