"""Uses of a graph: grad, backward, their order, threads, and what is kept."""

import pytest
import torch
from replicas import (
    accumulate,
    bare,
    beside,
    grads_of,
    grow,
    here,
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

from programs import X, grown, module, pairs, parameter, steps, uses

# ---- autograd.grad and backward -----------------------------------------------------

TARGETS = {
    "all parameters": lambda model, x: list(model.parameters()),
    "one parameter": lambda model, x: [next(iter(model.parameters()))],
    "the last parameter": lambda model, x: list(model.parameters())[-1:],
    "the input": lambda model, x: [x],
    "parameters and input": lambda model, x: [x, *model.parameters()],
}


@uses(net, TARGETS)
def gradients_are_those_that_are_asked_for(model, target):
    seen = []
    for seed in range(2):
        x = grown(integers(7, 3, seed=seed))
        seen.append(torch.autograd.grad(loss_of(model(x)), target(model, x)))
        assert x.grad is None
        loss_of(model(x)).backward(inputs=target(model, x))
        seen += [x.grad, *grads_of(model)]
    loss_of(model(X)).backward()
    return seen


@uses(net)
def a_retained_graph_serves_several_backwards(model, x):
    out = model(x)
    out.backward(torch.full_like(out, 2), retain_graph=True)
    loss = loss_of(out)
    loss.backward(retain_graph=True)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss_of(model(X)).backward()
    return grads


@uses(net)
def an_input_changed_before_backward_is_an_error(model):
    x = here(model, X.clone())
    out = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss_of(out).backward()
    model.zero_grad()
    loss_of(model(x)).backward()


CHANGED = {
    "input": lambda model, x, out: x.mul_(2),
    "output": lambda model, x, out: out.mul_(2),
    "weights": lambda model, x, out: grow(model),
}


@uses(smooth_net, CHANGED, exact=False)
def changed_tensors_keep_their_values_for_backward_where_torch_allows_it(model, change):
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        x = here(model, X.clone())
        out = model(x).exp()
        change(bare(model), x, out)
        out.sum().backward()
    return x, out


@uses(smooth_net, {"copied": False, "assigned": True}, exact=False)
def a_state_is_loaded_between_forward_and_backward(model, assign):
    """A copy in place is an error if a graph needs the old values; assigning is not."""
    state = {n: v * 2 for n, v in bare(model).state_dict().items()}
    out = model(grown())
    bare(model).load_state_dict(state, assign=assign)
    if assign:
        loss_of(out).backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss_of(out).backward()
    model.zero_grad()
    return steps(descends=False)(model)


@uses(net, {"first": False, "has .grad": True})
def a_parameter_frozen_before_backward_gets_no_gradient(model, is_kept):
    accumulate(model, int(is_kept))
    loss = step(model, X)
    bare(model)[0].weight.requires_grad_(False)
    loss.backward()
    seen = grads_of(model)
    bare(model)[0].weight.requires_grad_(True)
    accumulate(model)
    return seen


CHANGES = {
    "dtype": lambda m: m.float(),
    "strides": lambda m: m.to(memory_format=torch.channels_last),
    "shape": lambda m: setattr(m[0].weight, "data", torch.ones(1, 2, 3, 3).double()),
}


def convolutions():
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
    return integer_weights(nn.Sequential(*layers))


@uses(convolutions, pairs(CHANGES, {"False": False, "True": True}))
def parameters_take_another_form_between_forward_and_backward(model, change, is_kept):
    """Only of the last layer: tensors that the first one needs have changed."""
    output = model(integers(7, 2, 4, 4, low=-1, high=1))
    change(bare(model))
    targets = list(bare(model)[1].parameters())
    try:
        return torch.autograd.grad(loss_of(output), targets, create_graph=is_kept)
    except RuntimeError as error:
        return str(error)
    finally:
        bare(model)[0].weight.data = torch.ones(3, 2, 3, 3)  # one form for both again


# ---- gradients that users keep ------------------------------------------------------


@uses(net)
def gradients_that_a_user_keeps_do_not_change(model):
    kept = []
    for seed in range(4):
        model.zero_grad()
        loss_of(model(integers(7, 3, seed=seed))).backward()
        kept += zip([p.grad for p in model.parameters()], grads_of(model), strict=True)
    x = grown()
    grads = torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()])
    kept += [(grad, grad.clone()) for grad in grads]
    model.zero_grad()
    step(model, X).backward()
    assert all(torch.equal(grad, copied) for grad, copied in kept)


@uses(net)
def gradients_may_be_views_of_one_vector(model):
    """A backward adds gradients in place."""
    parameters = list(model.parameters())
    vector = torch.zeros(sum(p.numel() for p in parameters), dtype=X.dtype)
    parts = vector.split([p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.grad = part.view_as(p)
    own = [p.grad for p in parameters]
    accumulate(model, 3)
    assert all(p.grad is grad for p, grad in zip(parameters, own, strict=True))
    return vector


@uses(net)
def gradients_may_be_changed_without_changing_others(model):
    """As PCGrad and SAM do; gradients do not share a version counter either."""
    targets = [bare(model)[2].weight, bare(model)[2].bias]
    weight, bias = torch.autograd.grad(model(X).sum(), targets)
    before = bias._version
    weight.zero_()
    return bias, bias._version - before


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


# ---- the order of calls -------------------------------------------------------------


@uses(net, [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def backwards_may_come_in_any_order(model, order):
    xs = [grown(integers(7, 3, seed=seed)) for seed in range(3)]
    losses = [loss_of(model(x)) for x in xs]
    for i in order:
        losses[i].backward()
    return [x.grad for x in xs]


@uses(net)
def forward_and_backward_may_run_in_other_threads(model, x):
    for _ in range(2):
        (out,) = in_threads(lambda _: model(x), 1)
        loss_of(out).backward()
        in_threads(lambda _: loss_of(model(x)).backward(), 1)


HEADS = module(lambda m, x: (m.one(x), m.other(x)), one=net(), other=net(1))


@uses(HEADS)
def a_graph_lives_on_while_other_parameters_are_trained(model):
    optimizer = torch.optim.SGD(bare(model).one.parameters(), lr=1.0)
    one, other = model(X)
    loss_of(one).backward()
    optimizer.step()
    model(X)
    loss_of(other).backward()


@uses(HEADS)
def a_graph_does_not_use_parameters_that_were_overwritten(model):
    one, other = model(X)
    grow(bare(model).one)
    model(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(one[5:]).backward()
    loss_of(other).backward()


# ---- wrappers among other modules ---------------------------------------------------


@uses(net)
def the_bare_module_may_be_used_beside_its_wrapper(model):
    with torch.autograd.detect_anomaly():
        (loss_of(model(X)) + loss_of(bare(model)(here(model, X + 1)))).backward()


@uses(net)
def two_wrappers_of_other_devices_share_a_module(model):
    other = model
    if model is not bare(model):
        first, *others = model.device_ids
        other = beside(model, bare(model), [first, *others[::-1], first])
    for _ in range(2):
        first, second = model(X), other(X * 2)
        (loss_of(first) + loss_of(second)).backward()
        grow(bare(model))


def chained(wrap):
    return nn.Sequential(*[wrap(linear(), n) for n in (2, 3, 2)])


def within_another(wrap):
    return wrap(nn.Sequential(nn.Identity(), wrap(net())))


def with_a_shared_layer(wrap):
    shared = linear()
    inner = nn.Sequential(shared, linear(2))
    return nn.Sequential(shared, wrap(inner), nn.ReLU(), linear(1, 2))


@uses(
    nn.Identity(),
    {f.__name__: f for f in (chained, within_another, with_a_shared_layer)},
)
def a_wrapper_may_stand_among_others(model, x, make):
    """`make(wrap)` makes the modules; `wrap` wraps like the row, for n replicas."""

    def wrap(inner, n=2):
        ids = [*getattr(model, "device_ids", ())] * 2
        return beside(model, inner, ids[:n])

    outer = make(wrap)
    for _ in range(2):
        loss_of(outer(here(outer, x))).backward()
    return grads_of(outer)


# ---- threads, and odd gradients ------------------------------------------------------


@uses(net)
def several_threads_run_backward_through_one_graph(model):
    model(X)  # the first forward takes a different path
    loss = loss_of(model(X))
    weights = list(model.parameters())

    def differentiate(_):
        return torch.autograd.grad(loss, weights, retain_graph=True)

    return in_threads(lambda i: [differentiate(i) for _ in range(10)], 3)


@uses(lambda: nn.Sequential(linear(64, 64), linear(64, 64)))
def backwards_in_several_threads_add_up(model):
    x = integers(64, 64)
    for _ in range(4):
        in_threads(lambda i: model(x * i).sum().backward())


@uses(
    module(lambda m, x: x * m.factor, factor=parameter(integers(3))),
    broken_on={"cpu": "gather on the CPU passes no sparse gradient on"},
)
def an_output_may_have_a_sparse_gradient(model):
    rows = torch.tensor([1, 1, 5])
    functional.embedding(rows, model(X), sparse=True).sum().backward()
    (p,) = bare(model).parameters()
    p.grad = p.grad.to_dense()
