"""Forwards that assign parts and parameters to their module."""

import torch
from replicas import F64, bare, integers, linear, loss_of
from torch import nn
from torch.nn import functional

from programs import buffer, module, parameter, program, steps, uses


def loss_with_a_buffer(m, x):
    m.criterion = nn.CrossEntropyLoss(m.weights, reduction="none")
    return m.criterion(m.layer(x), (x[:, 0] > 0).long())[:, None] * x


def only_once(m, x):
    if not hasattr(m, "both"):
        m.both = nn.Sequential(m.layer, nn.ReLU())
    return m.both(x)


def frozen_parameters(m, x):
    m.scale = nn.Parameter(torch.full_like(x[0], 2.0), requires_grad=False)
    m.first = m.layer.requires_grad_()
    return m.first(x) * m.scale


def fewer_parts(m, x):
    out = m.layer(x) if m.last is None else m.last(m.layer(x))
    m.last = None
    return out


MADE = (
    loss_with_a_buffer,
    only_once,
    frozen_parameters,
    fewer_parts,
)


@program(
    steps(n=3),
    {make.__name__: {"make": make} for make in MADE},
    layer=linear(),
    last=linear(),
    weights=buffer(torch.tensor([1.0, 2.0, 4.0], **F64)),
    exact=False,
)
def a_forward_may_make_parts_that_train_nothing(m, x):
    return m.make(m, x)


@program(
    steps(n=3, descends=False),
    {kind: {"is_late": kind == "later"} for kind in ("at once", "later")},
    encoder=linear(),
    codes=nn.Embedding.from_pretrained(integers(4, 3), freeze=False),
    means=parameter(integers(4, 3, seed=1)),
    counts=buffer(torch.ones(4, **F64)),
    calls=0,
    in_parts=True,
    exact=False,
)
def moving_averages_may_be_assigned_as_new_parameters(m, x):
    """As a vector quantiser does: its codebook gets no gradient."""
    x = m.encoder(x)
    with torch.no_grad():
        nearest = torch.cdist(x, m.codes.weight).argmin(1)
    chosen = functional.one_hot(nearest, 4).double()
    found = (chosen @ m.codes.weight).detach()
    if m.calls >= m.is_late:
        m.counts = m.counts * 0.5 + chosen.sum(0) * 0.5
        m.means = nn.Parameter(m.means * 0.5 + (chosen.t() @ x) * 0.5)
        m.codes.weight = nn.Parameter(m.means / (m.counts[:, None] + 1))
    m.calls += 1
    return x + (found - x).detach()


def replaced_after_its_use(m, x):
    out = m.layer(x)
    m.layer.weight = nn.Parameter(m.layer.weight.detach() + 1)
    return out


@uses(lambda: module(replaced_after_its_use, layer=linear()))
def a_parameter_that_is_replaced_after_its_use_gets_its_gradient(model):
    weights, losses = [], []
    for seed in range(3):
        weights.append(bare(model).layer.weight)
        losses.append(loss_of(model(integers(7, 3, seed=seed))))
    sum(losses).backward()
    return [weight.grad for weight in weights]
