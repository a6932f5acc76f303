"""Changes between two calls, which every replica follows.

Changes that fit on a line are in `drawn_features.py`.
"""

import functools
from collections import OrderedDict

import torch
from replicas import F64, bare, grow, integers, linear, net
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from programs import THREE, trains, uses


@uses(net, [torch.float32, torch.float16, torch.bfloat16])
def all_may_be_converted(model, dtype):
    out = model(integers(7, 3))
    bare(model).to(dtype)
    x = integers(7, 3, dtype=dtype, low=-1, high=1)
    model(x).sum().backward()
    return out


class Doubled(nn.Module):
    """A parametrization with exact results."""

    factor = 2

    def forward(self, weight):
        return weight * self.factor

    def right_inverse(self, weight):
        return weight / self.factor


def parametrize_the(*names):
    def change(m):
        for name in names:
            parametrize.register_parametrization(m[0], name, Doubled())

    return change


def set_factor(m):
    m[0].parametrizations.weight[0].factor = 3


def remove(m):
    parametrize.remove_parametrizations(m[0], "weight")
    parametrize.remove_parametrizations(m[0], "bias", leave_parametrized=False)
    assert type(m[0]) is nn.Linear


trains(
    {"parametrizations_come_change_and_go": net},
    parametrize_the("weight"),
    parametrize_the("bias", "weight"),
    set_factor,
    remove,
    descends=False,
)


MAKES = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda m: prune.l1_unstructured(m, "weight", amount=0.5),
    "pruned twice": lambda m: prune.random_unstructured(
        prune.l1_unstructured(m, "weight", amount=0.5), "weight", amount=1
    ),
}


def three_layers():
    return nn.Sequential(linear(), nn.Tanh(), linear(2))


def computed(model, make):
    torch.manual_seed(3)
    make(model[0])
    return model


MODES = grow, nn.Module.eval, nn.Module.train

for name, make in MAKES.items():
    compute = functools.partial(computed, make=make)
    later = {f"weights_computed_later[{name}]": three_layers}
    trains(later, compute, *MODES, descends=False, exact=False)


def normalize(m):
    torch.manual_seed(3)
    nn.utils.spectral_norm(m[2])


trains(
    {"pruning_ends_with_the_weights_that_are_left": net},
    lambda m: prune.l1_unstructured(m[0], "weight", amount=0.5),
    lambda m: prune.remove(m[0], "weight"),
    normalize,
    lambda m: nn.utils.remove_spectral_norm(m[2]),
    exact=False,
)


class Ordered(nn.Module):
    """Uses its parameters, and its buffers, in the order of their dictionaries."""

    def __init__(self):
        super().__init__()
        self._parameters = OrderedDict(self._parameters)
        self._buffers = OrderedDict(self._buffers)
        for name, by in {"a": 2, "b": 3}.items():
            setattr(self, name, nn.Parameter(integers(3, 3) * by))
            self.register_buffer(f"of_{name}", torch.full((3,), float(by), **F64))

    def forward(self, x):
        for p, b in zip(self.parameters(), self.buffers(), strict=True):
            x = torch.relu(x @ p) + b
        return x


def to_the_end(of):
    def move(model):
        entries = getattr(bare(model), of)
        entries.move_to_end(next(iter(entries)))

    return move


trains(
    {"tensors_have_an_order_of_their_own": Ordered},
    to_the_end("_parameters"),
    to_the_end("_buffers"),
    to_the_end("_parameters"),
    in_parts=True,
    on=THREE,
)
