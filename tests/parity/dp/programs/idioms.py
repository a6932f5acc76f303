"""Code written for replicas of torch, which hold parameters as plain attributes.

Public libraries look for the parameters of a replica in the ways below.  A way that
finds none loses the gradients of that replica without a word.
"""

import torch
from replicas import linear
from torch import nn
from torch.func import functional_call

from programs import program, steps


def by_flag(part):
    """Look where torch keeps them, in what says that it is a replica (torchdiffeq)."""
    if not getattr(part, "_is_replica", False):
        return list(part.parameters())

    def trained(inner):
        held = vars(inner).items()
        return [(k, v) for k, v in held if torch.is_tensor(v) and v.requires_grad]

    return [p for _, p in part._named_members(get_members_fn=trained)]


def by_former(part):
    """Take a dictionary that torch's replicas have (equilibrium models)."""
    return [
        p
        for inner in part.modules()
        for p in (
            inner._former_parameters.values()
            if hasattr(inner, "_former_parameters")
            else inner.parameters(recurse=False)
        )
    ]


def by_flag_and_former(part):
    """Take that dictionary of what says that it is a replica (AIMET)."""
    if hasattr(part, "_is_replica") and part._is_replica:
        return [
            p for inner in part.modules() for p in inner._former_parameters.values()
        ]
    return [p for _, p in part.named_parameters()]


def by_attributes(part):
    """Take tensors among attributes if there are no parameters (transformers)."""
    try:
        next(part.parameters())
    except StopIteration:

        def tensors(inner):
            return [(k, v) for k, v in vars(inner).items() if torch.is_tensor(v)]

        return [p for _, p in part._named_members(get_members_fn=tensors)]
    return list(part.parameters())


class Adjoint(torch.autograd.Function):
    """Computes gradients of a part by a second forward, for given parameters alone."""

    @staticmethod
    def forward(ctx, part, x, *parameters):
        ctx.part, ctx.n = part, len(parameters)
        ctx.save_for_backward(x, *parameters)
        return part(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.part(x)
        return None, *torch.autograd.grad(out, (x, *parameters), grad)


@program(
    steps(n=3),
    {f.__name__: {"find": f} for f in (by_flag, by_former, by_flag_and_former)}
    | {by_attributes.__name__: {"find": by_attributes}},
    first=linear(),
    inner=nn.Sequential(linear(), nn.ReLU(), linear()),
)
def an_adjoint_finds_the_parameters_of_a_replica(m, x):
    return Adjoint.apply(m.inner, m.first(x), *m.find(m.inner))


@program(steps(n=3), inner=nn.Sequential(linear(), nn.ReLU(), linear()))
def a_forward_may_call_a_part_with_other_parameters(m, x):
    changed = {name: p * 2 for name, p in m.inner.named_parameters()}
    return functional_call(m.inner, changed, (x,)) + m.inner(x)


@program(steps(n=3), layer=linear())
def a_forward_may_put_a_tensor_in_place_of_a_parameter(m, x):
    held = m.layer._parameters
    before, held["weight"] = held["weight"], held["weight"] * 2
    out = m.layer(x)
    held["weight"] = before
    return out + m.layer(x)
