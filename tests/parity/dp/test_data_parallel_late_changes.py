"""What replicas would make of their parts of a batch alone is an error that says so.

The rule is one for threads, worker processes and GPUs.
"""

import copy

import paceline
import pytest
import torch
from replicas import assert_same, assert_same_grads, integer_weights, integers, loss_of
from torch import nn


class Scaled(nn.Module):
    """Scales its inputs by a buffer and a parameter, which a forward may thaw."""

    def __init__(self, thaws):
        super().__init__()
        self.thaws = thaws
        self.register_buffer("scale", integers(3))
        self.shift = nn.Parameter(integers(3, seed=1), requires_grad=False)
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x):
        if self.thaws is not None:
            getattr(self, self.thaws).requires_grad_()
        return self.layer(x * self.scale + self.shift)


@pytest.mark.parametrize("is_first", [True, False], ids=["first call", "later"])
@pytest.mark.parametrize("thaws", ["scale", "shift"])
def test_a_tensor_that_forward_thaws_is_trained_as_a_whole_or_named(
    wrap, thaws, is_first
):
    plain = Scaled(thaws)
    ours = wrap(copy.deepcopy(plain), 2)
    if not is_first:
        ours.module.thaws = None
        loss_of(ours(integers(7, 3))).backward()
        ours.zero_grad()
        ours.module.thaws = thaws
    # Threads share a parameter that they do not write, and thaw it together.
    is_by_threads = wrap.engine == "thread" and not wrap.is_gpu
    is_shared = thaws == "shift" and is_by_threads and not is_first
    if not is_shared:
        with pytest.raises(RuntimeError, match=f"'{thaws}' require a gradient"):
            ours(integers(7, 3))
    if (wrap.engine, thaws) == ("process", "scale"):
        return  # processes take no such buffer
    loss_of(ours(integers(7, 3))).backward()  # all of its gradient is seen now
    loss_of(plain(integers(7, 3))).backward()
    assert_same(getattr(ours.module, thaws).grad, getattr(plain, thaws).grad)


def test_a_tensor_that_forward_thaws_without_gradients_is_no_error(wrap):
    plain = Scaled("scale")
    ours = wrap(copy.deepcopy(plain), 2)
    with torch.no_grad():
        assert_same(ours(integers(7, 3)), plain(integers(7, 3)))


@pytest.mark.parametrize("engine", ["auto", "thread", "process"])
def test_max_norm_after_wrapping_is_never_of_a_part_of_the_rows(engine):
    table = nn.Embedding(8, 3, _weight=integers(8, 3, seed=2))
    plain = nn.Sequential(table, nn.Linear(3, 2).double())
    rows = torch.arange(8)
    with paceline.DataParallel(
        copy.deepcopy(plain), ["cpu"] * 2, engine=engine
    ) as ours:
        ours(rows)
        for model in (plain, ours.module):
            model[0].max_norm = 0.5
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"max_norm.*refresh\(\)|in place"):
                ours(rows)
        with torch.no_grad():  # processes have written to it
            ours.module[0].weight.copy_(plain[0].weight)
        ours.refresh()
        assert_same(ours(rows), plain(rows))
        assert_same(ours.module[0].weight, plain[0].weight)


CHANGED = "changed its parameters or modules|in place"


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
    if wrap.engine == "process":
        return
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
