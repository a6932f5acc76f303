"""Forwards that run a backward themselves."""

import torch
from replicas import bare, integer_weights, integers, linear, loss_of
from torch import nn

from programs import (
    CPU,
    GPUS,
    THREE,
    X,
    buffer,
    grown,
    module,
    parameter,
    program,
    steps,
    trains,
    uses,
)

CLEARS = {"use": steps(evaluates=False), "clears": True}
BACKWARDS = {
    "one": {"n": 1},
    "three": {"n": 3},
    "one, cleared": {"n": 1, **CLEARS},
    "three, cleared": {"n": 3, **CLEARS},
}


@program(
    steps(evaluates=False, zero=False),
    BACKWARDS,
    first=linear(),
    last=linear(2),
    clears=False,
)
def a_backward_inside_forward_leaves_the_plain_gradients(m, x):
    for _ in range(m.n):
        m.last(m.first(x.detach())).square().sum().backward()
        for p in m.parameters() if m.clears else ():
            p.grad = None
    return m.last(m.first(x))


def switch_on(m):
    m.is_on = True


@program(
    steps(switch_on, switch_on, n=1, evaluates=False),
    {
        f"{n}, {when}": {"wide": integer_weights(nn.Linear(3, n)), "is_on": is_on}
        for n in (2, 8000)
        for when, is_on in (("at first", True), ("later", False))
    },
    linear=linear(),
)
def a_backward_inside_forward_reaches_a_layer_of_its_own(m, x):
    if m.is_on:
        m.wide(x.detach()).square().sum().backward()
    return m.linear(x)


@program(steps(evaluates=False), linear=linear())
def a_backward_for_an_input_alone_may_run_in_forward(m, x):
    x = x.detach().requires_grad_()
    m.linear(x).square().sum().backward(inputs=[x])
    return m.linear(x.grad)


# ---- gradients that forward turns on or off ------------------------------------------


def used_later(model, is_on):
    """Use the output of a call with gradients on or off; also return the mode left."""
    seen = []
    for _ in range(2):
        x = grown()
        with torch.set_grad_enabled(is_on):
            out = model(x)
            mode = torch.is_grad_enabled()
        seen += [mode, out.requires_grad, torch.autograd.grad(out.sum(), x)[0]]
        with torch.set_grad_enabled(is_on):
            out = model(x)
        loss_of(out).backward()
        seen.append(x.grad)
    return seen


GRADIENTS = {
    str(is_on): {"use": lambda m, on=is_on: used_later(m, on)}
    for is_on in (False, True)
}


@program(cases=GRADIENTS, layer=linear(2), on=THREE)
def a_forward_that_turns_gradients_on_has_the_plain_graph(m, x):
    with torch.enable_grad():
        return m.layer(x)


@program(lambda model: used_later(model, True), layer=linear(2), on=THREE)
def a_forward_may_leave_gradients_off(m, x):
    y = m.layer(x)
    torch.set_grad_enabled(False)
    return y


@program(lambda model: written(model), layer=linear(2), on=CPU)
def a_forward_without_gradients_may_write_to_an_input_that_requires_some(m, x):
    x.add_(1)
    with torch.enable_grad():
        return m.layer(x)


def written(model):
    x = grown()
    with torch.no_grad():
        out = model(x)
    return out, x


# ---- in a forward without gradients -------------------------------------------------


def without_gradients(model):
    for _ in range(2):
        torch.no_grad()(model)(X)
    return [t.grad for t in bare(model).buffers()]


def after_ones(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    without_gradients(model)


@program(without_gradients, scale=buffer(integers(3).requires_grad_()))
def a_backward_for_a_buffer_in_a_forward_without_gradients(m, x):
    with torch.enable_grad():
        out = x * m.scale
        out.square().sum().backward()
    return out.detach()


def table(sparse):
    return integer_weights(nn.Embedding(4, 3, sparse=sparse))


KEPT = {"use": after_ones, "table": table(False)}
THAWS = {"thaws": True, "init": lambda m: m.layer.requires_grad_(False)}


@program(
    without_gradients,
    {
        "trained": {},
        "trained, has .grad": KEPT,
        "thaws": THAWS,
        "thaws, has .grad": {**THAWS, **KEPT},
    },
    layer=linear(2),
    table=table(True),
    thaws=False,
)
def a_backward_in_a_forward_reaches_all_gradients(m, x):
    m.layer.weight.requires_grad_(True)
    with torch.enable_grad():
        rows = m.table(x[:, 0].long().abs())
        (m.layer(x) + m.layer(rows)).square().sum().backward()
    m.layer.weight.requires_grad_(not m.thaws)
    return m.layer(x)


@program(
    lambda model: torch.no_grad()(model)(
        torch.cat([-X[:4].abs() - 1, X[:3].abs() + 1])
    ),
    layer=linear(2),
    on="cpu gpu2",
)
def other_replicas_alone_may_run_a_backward_within_a_forward(m, x):
    asks = x[:, 0] > 0
    if asks.any():
        with torch.enable_grad():
            m.layer(x[asks]).square().sum().backward()
    return m.layer(x)


def differentiates_itself(m, x):
    with torch.enable_grad():
        (x * m.weight.square()).sum().backward(create_graph=True)
    return x.detach()


@uses(module(differentiates_itself, weight=parameter(integers(3))), on=GPUS)
def gradients_of_a_backward_in_forward_have_gradients(model):
    torch.no_grad()(model)(X)
    return [p.grad.requires_grad for p in model.parameters()]


def force(m, x):
    """Take the gradient of an energy in forward; also return the grad mode."""
    mode = torch.full((len(x),), float(torch.is_grad_enabled()))
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        energy = m.energy(x).pow(3).sum()
    return torch.autograd.grad(energy, x)[0], mode


def frozen_force():
    return module(force, energy=linear(1)).requires_grad_(False)


trains({"a_frozen_module_takes_gradients_itself": frozen_force}, needs_grad=False)
