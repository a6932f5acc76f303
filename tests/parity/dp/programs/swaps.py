"""Weights that change owner, form and memory between forwards and their backward."""

import contextlib
from functools import partial

import pytest
import torch
from replicas import (
    F64,
    Parent,
    bare,
    grow,
    integers,
    linear,
    loss_of,
    slopes_of,
    smooth_net,
    squares_of,
    step,
)
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from programs import GPUS, X, buffer, module, pairs, parameter, program, steps, uses
from programs.changes import Doubled


@contextlib.contextmanager
def scaled(model, how):
    """Make weights three times as large inside the context."""
    parameters = list(model.parameters())
    kept = [p.data.clone() if how == "written" else p.data for p in parameters]
    set_all(parameters, [values * 3 for values in kept], how)
    yield
    set_all(parameters, kept, how)


def set_all(parameters, tensors, how):
    for p, values in zip(parameters, tensors, strict=True):
        if how == "written":
            p.data.copy_(values)
        elif how == "replaced":
            p.data = values
        else:
            torch.utils.swap_tensors(p, nn.Parameter(values))


TWO_WAYS = ["written", "replaced"]


@uses(
    smooth_net,
    pairs({way: way for way in TWO_WAYS}, {"trained": False, "frozen": True}),
    exact=False,
)
def an_evaluation_with_other_weights_leaves_a_graph_alone(model, how, is_frozen):
    """As a mean teacher that briefly borrows the student's module."""
    bare(model)[2].requires_grad_(not is_frozen)
    for _ in range(2):
        out = model(X)
        with scaled(model, how), torch.no_grad():
            target = model(X + 1)
        (out - target).square().sum().backward()
    return target


@uses(smooth_net, TWO_WAYS, exact=False)
def three_orders_of_gradients_with_other_weights_between_them(model, how):
    parameters = list(model.parameters())
    loss = loss_of(model(X)) + model(X[:5]).exp().sum()
    slopes = [slopes_of(loss, parameters)]
    for mode in (torch.no_grad, torch.enable_grad):
        with scaled(model, how), mode():
            model(X)
        slopes.append(slopes_of(squares_of(slopes[-1]), parameters))
    squares_of(slopes[-1]).backward()
    return slopes


@uses(smooth_net, [*TWO_WAYS, "swapped"], exact=False)
def evaluations_with_averages_between_accumulated_steps(model, how):
    kept = []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9, foreach=True)
    for k in range(6):
        step(model, integers(7, 3, seed=k)).backward()
        if k % 2 == 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=k % 4 == 1)
        with scaled(model, how), torch.inference_mode():
            values = model(integers(5, 3)).tolist()
        kept.append(torch.tensor(values, **F64))
    return kept


@uses(smooth_net, exact=False)
def saved_tensors_on_the_host_outlive_a_forward_with_other_weights(model):
    with torch.autograd.graph.save_on_cpu():
        out = model(X)
    return with_other_weights(model, "written", out)


def with_other_weights(model, how, out=None):
    out = model(X) if out is None else out
    with scaled(model, how), torch.no_grad():
        other = model(X)
    loss_of(out).backward()
    return other


@program(
    cases={how: {"use": partial(with_other_weights, how=how)} for how in TWO_WAYS},
    inner=smooth_net(),
    last=linear(2, 2),
    n=buffer(torch.zeros(1, **F64)),
    exact=False,
)
def a_checkpoint_repeats_its_forward_with_the_weights_put_back(m, x):
    m.n = m.n + 1
    return m.last(checkpoint(m.inner, x, use_reentrant=False)) * m.n


def picky(part, args):
    if args[0][-1, 0] == 99:
        raise ValueError("a row of 99")


@uses(smooth_net, exact=False)
def a_call_that_fails_leaves_graphs_and_weights_alone(model):
    kept = []
    bare(model)[0].register_forward_pre_hook(picky)
    for k in range(4):
        x = integers(7, 3, seed=k)
        first, bad = model(x), x.clone()
        bad[-1] = 99
        with pytest.raises(ValueError, match="a row of 99"):
            model(bad)
        kept.append(with_other_weights(model, "written", first))
    return kept


def evaluated_before_its_backward(model, n=2):
    """Run several forwards, then an evaluation, then the backward."""
    losses = [loss_of(model.train()(X + i)) for i in range(n)]
    model.eval()
    with torch.no_grad():
        model(X + 2)
    sum(losses).backward()


WRITES = {
    "in training": lambda m: m.training and m.scale.mul_(2),
    "once": lambda m: m.scale[0] == 1 and m.scale.copy_(torch.tensor([2.0, 3, 4])),
    "new memory": lambda m: setattr(m.first, "data", m.first.data.clone()),
}
USE_ONE = partial(evaluated_before_its_backward, n=1)


@program(
    evaluated_before_its_backward,
    {
        label: {"write": write, **({"use": USE_ONE} if label == "in training" else {})}
        for label, write in WRITES.items()
    },
    first=parameter(integers(3, 3)),
    scale=buffer(torch.ones(3, **F64)),
)
def a_forward_writes_what_no_graph_needs(m, x):
    m.write(m)
    return (x @ m.first).square() * m.scale


@program(
    USE_ONE,
    weight=parameter(integers(3)),
    norm=nn.BatchNorm1d(3, momentum=1.0, affine=False).double(),
    in_parts=True,
    exact=False,
    on=GPUS,
)
def an_evaluation_leaves_statistics_that_a_graph_needs_alone(m, x):
    return m.norm(x) + x * m.weight * m.norm.running_mean


# ---- parameters and buffers of another form, memory or size --------------------------


@uses(lambda: nn.Sequential(linear(4), linear(2, 4)), exact=False)
def conversions_may_swap_tensors(model):
    swap = torch.__future__.set_swap_module_params_on_conversion
    swap(True)
    kept = []
    try:
        for dtype in (torch.float64, torch.float32, torch.float64):
            bare(model).to(dtype)
            kept.append(model(X.to(dtype)))
            loss_of(kept[-1]).backward()
            model.zero_grad()
    finally:
        swap(False)
    return kept


@uses(
    module(
        lambda m, x: m.layer(x) + m.shift,
        layer=linear(),
        shift=buffer(torch.zeros(3, **F64)),
    )
)
def buffers_made_in_inference_mode_come_and_go(model):
    inner, kept = bare(model), []
    for k in range(3):
        with torch.inference_mode():
            inner.shift = inner.layer.weight.sum(0) * (k + 1)
            kept.append(model(X).tolist())
        inner.shift = inner.shift.clone()
        step(model, X).backward()
    return kept


def parametrized():
    made = nn.Sequential(linear(), nn.Tanh(), linear())
    for i in (0, 2):
        parametrize.register_parametrization(made[i], "weight", Doubled())
    return made


@uses(parametrized, exact=False)
def parametrizations_may_be_cached_over_several_calls(model):
    kept = []
    for k in range(4):
        with parametrize.cached():
            outs = [model(integers(n, 3, seed=k + n)) for n in (7, 5, 6)]
            sum(map(loss_of, outs)).backward()
        kept += outs
        grow(model, 0.9)
    return kept


def given(model, seed):
    """Return tensors without a graph, to replace the parameters of a model."""
    named = model.named_parameters()
    return {name: integers(*p.shape, seed=seed) * 0.5 for name, p in named}


@uses(
    module(
        lambda m, x: (x @ m.first).tanh() @ m.last,
        first=parameter(integers(3, 3)),
        last=parameter(integers(3, 3, seed=1)),
    ),
    {"new": True, "written": False},
    exact=False,
)
def tensors_for_parameters_belong_to_the_graphs_that_saved_them(model, x, is_new):
    """As in a hypernetwork, or an evaluation with drawn weights."""
    parent = Parent(model)
    weights = given(parent, 5)
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    one = functional_call(parent, weights, (x,))
    other = given(parent, 6) if is_new else weights
    for tensor in () if is_new else weights.values():
        tensor.data.mul_(2)
    two = functional_call(parent, other, (X,))
    for name, tensor in weights.items():
        tensor.data.copy_(kept[name])
    loss_of(one).backward()
    return one, two


@uses(smooth_net, exact=False)
def an_inner_step_is_differentiated(model):
    """As in meta-learning."""
    parent = Parent(model)
    names = [name for name, _ in parent.named_parameters()]
    parameters = list(parent.parameters())
    for k in range(2):
        loss = step(model, integers(7, 3, seed=k))
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        moved = [p - 0.01 * grad for p, grad in zip(parameters, grads, strict=True)]
        fast = dict(zip(names, moved, strict=True))
        loss_of(functional_call(parent, fast, (X[:5],))).backward()


def one_of_two(m, x):
    return (m.first if m.is_first else m.last)(x)


@uses(lambda: module(one_of_two, first=linear(), last=linear(2), is_first=True))
def graphs_of_parameters_run_where_these_are_used(model):
    parent = Parent(model)
    weights = {name: p * p for name, p in parent.named_parameters()}
    outs = []
    for bare(model).is_first in (True, False):
        outs.append(functional_call(parent, weights, (X,)))
        loss_of(outs[-1]).backward()
    return outs


SIZED = {"weight": parameter(integers(3)), "after": buffer(integers(3, seed=2))}


@program(**SIZED, size=buffer(torch.zeros(0, **F64)))
def a_buffer_without_elements_may_be_given_some(m, x):
    m.size.resize_(20).fill_(5)
    return x * m.weight * m.after + m.size[1]


@program(steps(needs_grad=False), **SIZED, size=buffer(torch.zeros(1, **F64)))
def a_buffer_may_take_other_memory_or_less_of_its_own(m, x):
    m.size.data = torch.full((30,), 7.0, **F64)
    m.after.resize_(1)
    return x * m.weight * m.after.clone() + m.size[1]
