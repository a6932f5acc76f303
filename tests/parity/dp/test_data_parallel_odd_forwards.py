"""What few forwards do besides computing: hooks, lists, generators, checkpoints."""

import copy
import random
import time
from itertools import pairwise

import numpy as np
import paceline
import pytest
import torch
from gpu_programs import compare, train
from paceline import _gpu
from replicas import (
    assert_same,
    assert_same_grads,
    integer_weights,
    integers,
    linear,
    loss_of,
    reals,
    smooth_net,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

F64 = {"dtype": torch.float64}


# ---- what it leaves behind ----------------------------------------------------------


class KeepsTable(nn.Module):
    """Makes a table in its first call, and has kept it since."""

    def __init__(self):
        super().__init__()
        self.layer, self.table, self.seen = linear(3, 3), None, []

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(1, 4, **F64)
        self.seen.append(self.table)
        return self.layer(x) * self.table


@pytest.mark.parametrize("index", [0, -1], ids=["GPU", "CPU"])
def test_a_table_that_a_forward_keeps_is_on_each_gpu_in_the_next(
    n_gpus, index, monkeypatch
):
    ours, plain = paceline.DataParallel(KeepsTable()), KeepsTable()
    x = integers(7, 3)
    ours(x)
    table = ours.module.table

    def index_of(tensor, expected):
        return index if tensor is table else expected

    monkeypatch.setattr(_gpu.machine, "index_of_tensor", index_of)
    seen = ours.module.seen
    seen.clear()
    assert_same(ours(x), plain(x))
    n_kept = 1 if index == 0 else n_gpus  # what is on no GPU stays where it is
    assert [kept is table for kept in seen].count(True) == n_kept
    assert all(torch.equal(kept, table) for kept in seen)
    assert len(seen) == n_gpus
    assert ours.module.table is table


class Remembers(nn.Module):
    """Appends a number to a list in each call."""

    def __init__(self):
        super().__init__()
        self.layer, self.losses = linear(3, 3), []

    def forward(self, x):
        y = self.layer(x)
        self.losses.append(y.detach().mean())
        return y


def test_a_list_grows_by_as_many_entries_in_each_call(wrap):
    ours, sizes = wrap(Remembers()), [0]
    for _ in range(4):
        ours(integers(7, 3))
        sizes.append(len(ours.module.losses))
    assert len({after - before for before, after in pairwise(sizes)}) == 1


CHANGED = "changed its parameters or modules"


class Growing(nn.Module):
    """Makes its second layer when it first runs, or anew in each call."""

    def __init__(self, is_new):
        super().__init__()
        self.is_new = is_new
        self.layers = nn.ModuleList([nn.Linear(3, 3).double()])

    def forward(self, x):
        if len(self.layers) < 2:
            self.layers.append(integer_weights(nn.Linear(3, 2)))
        elif self.is_new:
            self.layers[1].weight = nn.Parameter(self.layers[1].weight.detach() * 2)
        return self.layers[1](self.layers[0](x))


def test_a_layer_that_a_forward_makes_is_an_error_and_trained_from_then_on(wrap):
    ours = wrap(Growing(is_new=False), 2)
    with pytest.raises(RuntimeError, match=CHANGED):
        ours(integers(7, 3))
    plain = copy.deepcopy(ours.module)
    for model in (ours, plain):
        loss_of(model(integers(7, 3))).backward()
    assert_same_grads(ours, plain)


def test_a_parameter_that_a_forward_replaces_is_an_error(wrap):
    module = Growing(is_new=False)
    module(integers(7, 3))
    module.is_new = True
    with pytest.raises(RuntimeError, match=CHANGED):
        wrap(module, 2)(integers(7, 3))


class HooksWeight(nn.Module):
    """Puts a hook on a parameter in each call."""

    def __init__(self, is_hooking=True):
        super().__init__()
        self.layer, self.is_hooking = linear(3, 3), is_hooking

    def forward(self, x):
        if self.is_hooking:
            self.layer.weight.register_hook(lambda grad: grad * 2)
        return self.layer(x)


def test_a_hook_that_a_forward_puts_on_a_parameter_is_an_error(wrap):
    ours = wrap(HooksWeight())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a hook on"):
            ours(integers(7, 3))
        ours.module.layer.weight._backward_hooks.clear()
    ours.module.is_hooking = False
    plain = HooksWeight(is_hooking=False)
    for model in (ours, plain):
        loss_of(model(integers(7, 3))).backward()
    assert_same(ours.module.layer.weight.grad, plain.layer.weight.grad)


class Freezes(nn.Module):
    """Freezes a part for a while, as of what is to train another part alone."""

    def __init__(self):
        super().__init__()
        self.made, self.judge = linear(3, 3), smooth_net()

    def forward(self, x):
        made = self.made(x)
        self.judge.requires_grad_(False)
        judged = self.judge(made)
        self.judge.requires_grad_(True)
        return judged, self.judge(made.detach())


def test_a_part_that_a_forward_freezes_is_an_error_as_in_torch(wrap):
    with pytest.raises(RuntimeError, match="only change requires_grad flags of lea"):
        wrap(Freezes())(integers(8, 3))


# ---- random numbers -----------------------------------------------------------------


class AddsNoise(nn.Module):
    """Draws from a generator, once it is told to; replica 0 may be late for that."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = linear(3, 3), kind
        self.is_late, self.is_drawing = False, False

    def forward(self, x, generator=None):
        if self.is_late and not getattr(self, "_is_replica", False):
            time.sleep(0.05)
        if not self.is_drawing:
            return self.layer(x)
        if self.kind == "random":
            return self.layer(x) * random.random()
        if self.kind == "numpy":
            return self.layer(x) * np.random.rand()
        return self.layer(x) + torch.randn(len(x), 1, generator=generator, **F64)


@pytest.mark.parametrize("kind", ["random", "numpy", "argument"])
def test_replicas_take_turns_at_a_generator(wrap, kind):
    ours, x = wrap(AddsNoise(kind)), integers(7, 3)
    generator = torch.Generator()
    arguments = (x, generator) if kind == "argument" else (x,)
    for _ in range(2):
        ours(*arguments)
    ours.module.is_drawing = True
    ours(*arguments)  # on GPUs the first that draws is told of
    drawn = []
    for ours.module.is_late in (False, True, False, True):
        generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        drawn.append(ours(*arguments))
    assert all(torch.equal(each, drawn[0]) for each in drawn)


# ---- graphs -------------------------------------------------------------------------


class HoldsWrapper(nn.Module):
    """Repeats, in backward, the call of a wrapper that it holds."""

    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.layer, self.inner = linear(3, 3), inner
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, self.layer(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_round_a_wrapper_in_a_wrapper(n_gpus, use_reentrant):
    calls = []

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = smooth_net()

        def forward(self, x):
            calls.append(len(x))
            return self.net(x)

    def make():
        return HoldsWrapper(paceline.DataParallel(Inner()), use_reentrant)

    compare(make, lambda model: train(model, kept := []) or kept)
    calls.clear()
    ours = paceline.DataParallel(make())
    loss_of(ours(integers(3 * n_gpus, 3))).backward()
    assert calls == [3] * 2 * n_gpus  # once, and again, and never in parts


class Scales(nn.Module):
    """Passes a sparse gradient on, which a linear layer refuses."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(integers(3))

    def forward(self, x):
        return x * self.factor


def test_an_output_may_have_a_sparse_gradient(n_gpus):
    ours, plain = paceline.DataParallel(Scales()), Scales()
    x, rows = integers(7, 3), torch.tensor([1, 1, 5])
    for model in (ours, plain):
        functional.embedding(rows, model(x), sparse=True).sum().backward()
    mine, theirs = ours.module.factor.grad, plain.factor.grad
    assert_same(mine.to_dense(), theirs.to_dense())


def test_a_trace_of_the_wrapper_computes_what_it_is_given(wrap):
    ours = wrap(smooth_net())
    ours(reals(7, 3))
    traced = torch.jit.trace(ours, reals(7, 3))
    x = reals(9, 3, seed=5)
    torch.testing.assert_close(traced(x), ours.module(x))
    with torch.no_grad():
        for parameter in ours.module.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(traced(x), ours.module(x))


class ReturnsNested(nn.Linear):
    """Returns rows of their own, which have no shape together."""

    def forward(self, x):
        rows = list(super().forward(x).detach())
        return torch.nested.nested_tensor(rows, layout=torch.jagged)


def test_a_nested_output_is_an_error_that_says_what_to_do(wrap):
    ours = wrap(ReturnsNested(3, 2))
    with pytest.raises(ValueError, match=r"is a nested tensor.*override gather"):
        ours(torch.ones(7, 3))
