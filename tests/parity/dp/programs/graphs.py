"""What is done with a graph: grad, backward, their order, threads, and what is kept."""

import copy
import functools
import threading
import warnings

import pytest
import torch
from replicas import (
    bare,
    integer_weights,
    integers,
    linear,
    loss_of,
    net,
    smooth_net,
    step,
)
from support.threads import in_threads
from torch import nn
from torch.nn import functional

from programs import (
    EVERYWHERE,
    Made,
    X,
    buffer,
    parameter,
    program,
    steps,
    trains,
    uses,
)

Y = integers(5, 3, seed=1)


def grown(x=X):
    """Return a leaf of its own that requires a gradient."""
    return x.clone().requires_grad_()


# ---- autograd.grad and backward -----------------------------------------------------

TARGETS = {
    "all parameters": lambda model, x: list(model.parameters()),
    "one parameter": lambda model, x: [next(iter(model.parameters()))],
    "the last parameter": lambda model, x: list(model.parameters())[-1:],
    "the input": lambda model, x: [x],
    "parameters and input": lambda model, x: [x, *model.parameters()],
}


@uses(net, TARGETS)
def grad_returns_what_is_asked_for(model, target):
    seen = []
    for seed in range(2):
        x = grown(integers(7, 3, seed=seed))
        seen.append(torch.autograd.grad(loss_of(model(x)), target(model, x)))
        assert x.grad is None
    return seen


@uses(net, TARGETS)
def backward_fills_only_the_inputs_named(model, target):
    x = grown()
    loss_of(model(x)).backward(inputs=target(model, x))
    seen = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    loss_of(model(X)).backward()
    return x.grad, seen


@uses(net)
def grad_may_stop_at_the_output(model):
    x = grown()
    out = model(x)
    (slope,) = torch.autograd.grad(loss_of(out.square()), out, retain_graph=True)
    out.backward(slope)
    return slope, x.grad


def idle():
    return Made(lambda m, x: m.used(x), {"used": linear(2), "idle": linear(2)})


@uses(idle)
def grad_may_allow_unused_parameters(model):
    targets = list(model.parameters())
    seen = torch.autograd.grad(loss_of(model(X)), targets, allow_unused=True)
    assert [grad is None for grad in seen] == [False, False, True, True]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss_of(model(X)), targets)
    return seen


@uses(net)
def backward_takes_the_gradient_of_an_output(model):
    x = grown()
    out = model(x)
    out.backward(torch.full_like(out, 2))
    return x.grad


@uses(net)
def a_retained_graph_serves_several_backwards(model):
    x = grown()
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward(retain_graph=True)
    assert torch.equal(x.grad, 2 * once)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss_of(model(X)).backward()
    return x.grad, grads


@uses(net)
def a_weight_changed_before_backward_is_an_error(model):
    loss = loss_of(model(X))
    with torch.no_grad():
        bare(model)[2].weight.add_(1)
    model(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss_of(model(X)).backward()


@uses(net)
def an_input_changed_before_backward_is_an_error(model):
    x = X.clone()
    out = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss_of(out).backward()
    model.zero_grad()
    loss_of(model(x)).backward()


@uses(smooth_net, {"copied": False, "assigned": True}, exact=False)
def a_state_is_loaded_between_forward_and_backward(model, assign):
    """In place is an error where a graph needs the old ones; assigned, it is not."""
    state = {n: v * 2 for n, v in bare(model).state_dict().items()}
    out = model(grown())
    bare(model).load_state_dict(state, assign=assign)
    if assign:
        loss_of(out).backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss_of(out).backward()
    model.zero_grad()
    return steps(descend=None)(model)


@uses(net, {"first": False, "has .grad": True})
def a_parameter_frozen_before_backward_gets_no_gradient(model, is_kept):
    if is_kept:
        step(model, X).backward()
    loss = step(model, X)
    bare(model)[0].weight.requires_grad_(False)
    loss.backward()
    seen = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    bare(model)[0].weight.requires_grad_(True)
    step(model, X).backward()
    return seen


CHANGES = {
    "dtype": lambda m: m.float(),
    "strides": lambda m: m.to(memory_format=torch.channels_last),
    "shape": lambda m: setattr(m[0].weight, "data", torch.ones(1, 2, 3, 3).double()),
}


def convolutions():
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
    return integer_weights(nn.Sequential(*layers))


@uses(convolutions, {f"{c}, {g}": (c, g) for c in CHANGES for g in (False, True)})
def parameters_take_another_form_between_forward_and_backward(model, case):
    """Of the last layer alone: what the first one needs has changed."""
    change, create_graph = case
    output = model(integers(7, 2, 4, 4, low=-1, high=1))
    CHANGES[change](bare(model))
    targets = list(bare(model)[1].parameters())
    try:
        grads = torch.autograd.grad(loss_of(output), targets, create_graph=create_graph)
        seen = [grad.detach() for grad in grads]
    except RuntimeError as error:
        seen = str(error)
    bare(model)[0].weight.data = torch.ones(3, 2, 3, 3)  # of one form again
    return seen


# ---- gradients that users keep ------------------------------------------------------


@uses(net)
def gradients_that_a_user_keeps_do_not_change(model):
    kept = []
    for seed in range(4):
        model.zero_grad()
        loss_of(model(integers(7, 3, seed=seed))).backward()
        kept += [(p.grad, p.grad.clone()) for p in model.parameters()]
    x = grown()
    grads = torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()])
    kept += [(grad, grad.clone()) for grad in grads]
    model.zero_grad()
    loss_of(model(x + 1)).backward()
    for grad, copied in kept:
        assert torch.equal(grad, copied)


@uses(net)
def a_gradient_in_place_is_added_to_in_place(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    own = [p.grad for p in model.parameters()]
    for seed in range(2):
        loss_of(model(integers(7, 3, seed=seed))).backward()
    assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))


@uses(net)
def gradients_may_be_changed_without_changing_others(model):
    """As PCGrad and SAM do: take two gradients, change one, add them."""
    parts = []
    for part in (X[:5], X[2:]):
        model.zero_grad()
        loss_of(model(part)).backward()
        parts.append([p.grad for p in model.parameters()])
    for grad in parts[0]:
        grad.mul_(3)
    for p, *both in zip(model.parameters(), *parts, strict=True):
        p.grad = both[0] + both[1]
    return parts


@uses(net)
def gradients_may_be_views_of_one_vector(model):
    parameters = list(model.parameters())
    vector = torch.zeros(sum(p.numel() for p in parameters), dtype=X.dtype)
    parts = vector.split([p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.grad = part.view_as(p)
    for seed in range(3):
        step(model, integers(7, 3, seed=seed)).backward()
    return vector


@uses(net)
def gradients_do_not_share_a_count_of_versions(model):
    targets = [bare(model)[2].weight, bare(model)[2].bias]
    weight, bias = torch.autograd.grad(model(X).sum(), targets)
    before = bias._version
    weight.zero_()
    return bias._version - before


@uses(convolutions, {"rows": torch.contiguous_format, "channels": torch.channels_last})
def gradients_have_the_layout_of_the_plain_ones(model, form):
    bare(model).to(memory_format=form)
    x = integers(5, 2, 4, 4).to(memory_format=form)
    strides = []
    bare(model)[0].register_forward_hook(
        lambda m, args, out: strides.append(m.weight.stride())
    )
    step(model, x).backward()
    strides = [set(strides), *(p.grad.stride() for p in model.parameters())]
    return strides, [p.stride() for p in model.parameters()]


@uses(lambda: linear(4, 4))
def a_parameter_may_be_given_other_strides(model):
    seen = []
    for lies_otherwise in (False, True, True):
        if lies_otherwise:
            weight = bare(model).weight
            weight.data = weight.data.t().contiguous().t()
        out = model(integers(7, 4))
        loss_of(out).backward()
        seen.append(out)
    return seen


# ---- the order of calls -------------------------------------------------------------


@uses(net)
def two_forwards_may_go_into_one_backward(model):
    a, b = grown(), grown(Y)
    (loss_of(model(a)) + 2 * loss_of(model(b))).backward()
    loss_of(model(a[:, :3]) * model(a)).backward()
    return a.grad, b.grad


@uses(net, {str(order): order for order in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]})
def backwards_may_come_in_any_order(model, order):
    xs = [grown(integers(7, 3, seed=seed)) for seed in range(3)]
    losses = [loss_of(model(x)) for x in xs]
    for i in order:
        losses[i].backward()
    return [x.grad for x in xs]


@uses(net)
def a_forward_without_gradients_may_come_between(model):
    x = grown()
    loss = loss_of(model(x))
    with torch.no_grad():
        model(x[:5] + 1)
    abandoned = model(x + 2)
    loss.backward()
    return x.grad, abandoned.detach()


SIZES = [(7, 2), (2, 7), (7, 1, 7), (1, 2, 7)]


@uses(net, {str(sizes): sizes for sizes in SIZES}, on=f"cpu3 {EVERYWHERE}")
def calls_of_different_sizes_may_share_a_backward(model, sizes):
    for _ in range(2):
        model.zero_grad()
        sum(step(model, X[:n]) for n in sizes).backward()


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@uses(net)
def forward_and_backward_may_run_in_other_threads(model):
    x = grown()
    for _ in range(2):
        loss_of(in_a_thread(lambda: model(x))).backward()
        in_a_thread(loss_of(model(x)).backward)
    return x.grad


@uses(net)
def graphs_may_be_left_half_way(model):
    def losses():
        for seed in range(5):
            yield loss_of(model(integers(7, 3, seed=seed)))

    model(X)  # an output dropped
    loss_of(model(X))  # a loss dropped
    left = losses()
    next(left)
    last = next(left)
    left.close()
    last.backward()


# ---- two halves ---------------------------------------------------------------------


def heads():
    held = {"one": net(), "other": net(1)}
    return Made(lambda m, x: (m.one(x), m.other(x)), held)


@uses(heads)
def a_graph_lives_on_while_other_parameters_are_trained(model):
    optimizer = torch.optim.SGD(bare(model).one.parameters(), lr=1.0)
    one, other = model(X)
    loss_of(one).backward()
    optimizer.step()
    model(X)
    loss_of(other).backward()


@uses(heads)
def a_graph_does_not_use_parameters_that_were_overwritten(model):
    one, _ = model(X)
    with torch.no_grad():
        bare(model).one[2].weight.add_(1)
    model(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(one[5:]).backward()


@program(
    lambda model: [loss_of(out).backward() for out in [model(X), model(X + 1)]][:0],
    layer=linear(),
    scale=buffer(integers(3)),
    n=buffer(torch.zeros(()).double()),
)
def a_counter_goes_on_between_two_forwards(m, x):
    m.n += 1
    return m.layer(x) * m.scale


# ---- wrappers among other modules ---------------------------------------------------


@uses(net)
def a_step_runs_while_anomalies_are_looked_for(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        with torch.autograd.detect_anomaly():
            loss_of(model(X)).backward()


@uses(net)
def the_bare_module_may_be_used_beside_its_wrapper(model):
    (loss_of(model(X)) + loss_of(bare(model)(X + 1))).backward()


def wrapped_again(model, n=None):
    """Return another wrapper of the same module, of `n` replicas; or the module."""
    if model is bare(model):
        return model
    ids = model.device_ids if n is None else [*model.device_ids][:1] * n
    return type(model)(bare(model), ids[::-1])


@uses(net)
def two_wrappers_of_other_devices_share_a_module(model):
    other = wrapped_again(model)
    for k in range(2):
        first, second = model(X), other(X * 2)
        (loss_of(first) + loss_of(second)).backward()
        with torch.no_grad():
            for p in bare(model).parameters():
                p.add_(k + 1)


def rewrapped(make):
    """Return a use of modules that `make(wrap)` makes; `wrap` wraps as the row's."""

    def use(model):
        def wrap(inner, n=None):
            if model is bare(model):
                return inner
            ids = model.device_ids
            return type(model)(inner, ids if n is None else (list(ids) * 2)[:n])

        outer = make(wrap)
        seen = []
        for seed in range(2):
            x = grown(integers(7, 3, seed=seed))
            loss_of(outer(x)).backward()
            seen.append([x.grad, *[p.grad.clone() for p in outer.parameters()]])
        return seen

    return use


def chained(wrap):
    return nn.Sequential(*[wrap(linear(), n) for n in (2, 3, 2)])


def within_another(wrap):
    return wrap(nn.Sequential(nn.Identity(), wrap(net())))


def within_a_larger_model(wrap, is_shared=False):
    shared = linear()
    inner = nn.Sequential(shared if is_shared else linear(), linear(2))
    return nn.Sequential(shared, wrap(inner), nn.ReLU(), linear(1, 2))


WRAPPERS = {
    "chained": chained,
    "within another": within_another,
    "within a larger model": within_a_larger_model,
    "with a shared layer": functools.partial(within_a_larger_model, is_shared=True),
}

for name, make in WRAPPERS.items():
    trains({f"a_wrapper_among_others[{name}]": nn.Identity}, rewrapped(make))


# ---- threads ------------------------------------------------------------------------


@uses(net)
def several_threads_run_backward_through_one_graph(model):
    model(X)  # the first forward is another one
    loss = loss_of(model(X))
    parameters = list(model.parameters())

    def run():
        return [
            torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(10)
        ]

    found = in_threads(lambda _: run(), 3)
    return [gradients for grads in found for gradients in grads]


def wide():
    layers = nn.Linear(64, 64), nn.Linear(64, 64)
    return integer_weights(nn.Sequential(*layers))


@uses(wide)
def backwards_in_several_threads_add_up(model):
    x = integers(64, 64)
    for _ in range(4):
        in_threads(lambda i: model(x * i).sum().backward())


@uses(smooth_net, exact=False)
def several_threads_train_models_of_their_own(model):
    def train(other):
        optimizer = torch.optim.SGD(other.parameters(), 1e-3)
        for seed in range(5):
            optimizer.zero_grad()
            step(other, integers(7, 3, seed=seed)).backward()
            optimizer.step()
        return [p.detach() for p in other.parameters()]

    own = [copy.deepcopy(model) for _ in range(3)]
    return in_threads(lambda i: train(own[i]), 3)


# ---- inexact numbers, and odd gradients ---------------------------------------------


@uses(
    lambda: Made(lambda m, x: x * m.factor, {"factor": parameter(integers(3))}),
    broken_on={"cpu": "gather on the CPU passes no sparse gradient on"},
)
def an_output_may_have_a_sparse_gradient(model):
    rows = torch.tensor([1, 1, 5])
    functional.embedding(rows, model(X), sparse=True).sum().backward()
    (p,) = bare(model).parameters()
    p.grad = p.grad.to_dense()
