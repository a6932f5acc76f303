"""Replicas on GPUs whose parameters torch's transforms of functions have given."""

import copy

import paceline
import pytest
import torch
from gpu_programs import F64, Parent, assert_same, integers, linear
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap


class Net(nn.Module):
    """Two layers, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = linear(3, 4), linear(4, 2)
        self.register_buffer("scale", torch.tensor(2.0, **F64))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale


def as_function(model):
    """Return a function of the model's parameters and buffers, and of its input."""
    parent = Parent(model)
    prefix = "inner.module." if isinstance(model, nn.DataParallel) else "inner."

    def run(state, x):
        named = {prefix + name: tensor for name, tensor in state.items()}
        return functional_call(parent, named, (x,))

    return run


def squares_of(f):
    return lambda *arguments: f(*arguments).square().sum()


def ones_like(state):
    return {name: torch.ones_like(tensor) for name, tensor in state.items()}


def ensemble_of(state):
    return {name: torch.stack([t, t * 2]) for name, t in state.items()}


def derivative_along(f, state, x):
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(tensor, torch.ones_like(tensor))
            for name, tensor in state.items()
        }
        return forward_ad.unpack_dual(f(duals, x)).tangent


def gradients_by_sample(f, state, x):
    def loss_of_row(row):
        return grad(squares_of(f))(state, row.expand(4, 3))

    return vmap(loss_of_row)(x)


def curvature(f, state, x):
    def loss_of_bias(bias):
        return squares_of(f)({**state, "last.bias": bias}, x)

    return hessian(loss_of_bias)(state["last.bias"])


TRANSFORMS = {
    "grad": lambda f, state, x: grad(squares_of(f), argnums=(0, 1))(state, x),
    "vjp": lambda f, state, x: vjp(f, state, x)[1](torch.ones(len(x), 2, **F64)),
    "jvp": lambda f, state, x: jvp(f, (state, x), (ones_like(state), x)),
    "jacrev": lambda f, state, x: jacrev(f)(state, x),
    "jacfwd": lambda f, state, x: jacfwd(f)(state, x),
    "vmap": lambda f, state, x: vmap(f, (0, None))(ensemble_of(state), x),
    "vmap of grad": lambda f, state, x: vmap(grad(squares_of(f)), (0, None))(
        ensemble_of(state), x
    ),
    "by sample": gradients_by_sample,
    "hessian": curvature,
    "dual numbers": derivative_along,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_parameters_do_as_with_the_plain_module(n_gpus, transform):
    model = Net()
    state = {n: tensor.detach().clone() for n, tensor in model.state_dict().items()}
    ours = as_function(paceline.DataParallel(copy.deepcopy(model)))
    x = integers(7, 3)
    expected = transform(as_function(model), state, x)
    for _ in range(2):
        assert_same(transform(ours, state, x), expected, exact=False)
