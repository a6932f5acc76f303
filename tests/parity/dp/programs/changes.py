"""What may change between two calls: every replica follows."""

import copy
import functools
from types import MethodType, SimpleNamespace

import numpy as np
import torch
from replicas import bare, integer_weights, integers, linear, net
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from programs import slowly, steps, trains, uses

# ---- what attributes hold, and its form ---------------------------------------------


class Holder(nn.Module):
    """Computes by what it holds and by what that is like, each by a weight."""

    def __init__(self):
        super().__init__()
        self.linear = linear(4)
        self.weight = nn.Parameter(integers(4, low=1))
        self.complex = nn.Parameter(torch.tensor([1 + 2j, 3j, 1, 2]))
        self.register_buffer("kept", integers(4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3j, 1, 2]))
        self.power, self.options = 1, {"scales": [1, 2], "deep": ({"x": 1}, 5)}
        self.space = SimpleNamespace(gain=1)
        self.held = [integers(4, low=1), integers(8)[::2]]
        self.array = np.arange(4.0)
        self.hidden = [linear(4, 4).requires_grad_(False)]

    def forward(self, x):
        y = self.hidden[0](self.linear(x)) % 11
        y = y + self.weight.flatten() * self.weight.dim()
        y = y + (self.complex * 1j).real.double() + self.kept
        y = y + (~self.mask).double() + self.phase.resolve_conj().imag.double()
        for tensor in self.held:
            y = y + tensor.flatten().double() * (1 + tensor.dim())
        y = y + torch.from_numpy(self.array).flatten().double() * self.array.ndim
        numbers = (*self.options["scales"], self.options["deep"][0]["x"], self.power)
        y = y * (sum((i + 2) * n for i, n in enumerate(numbers)) + self.space.gain)
        return y + sum(t.requires_grad for t in (*self.held, self.kept))


def set_data(find, make):
    def change(module):
        tensor = find(module)
        tensor.data = make(tensor.data)

    return change


HELD = {
    "an attribute": lambda m: setattr(m, "power", 5),
    "an item of a list": lambda m: m.options["scales"].__setitem__(1, 9),
    "a list": lambda m: m.options["scales"].append(4),
    "deep in a dict": lambda m: m.options["deep"][0].update(x=5),
    "an object": lambda m: setattr(m.space, "gain", 4),
    "a tensor in place": lambda m: m.held[0].mul_(3),
    "a tensor's shape": set_data(lambda m: m.held[0], lambda d: d.view(2, 2)),
    "a tensor's dtype": set_data(lambda m: m.held[0], lambda d: d.view(torch.int64)),
    "a tensor with gaps": lambda m: m.held[1].data.__setitem__(3, 9),
    "weights that nobody has registered": lambda m: m.hidden[0].weight.data.add_(1),
    "an array": lambda m: m.array.__iadd__(1),
    "an array's shape": lambda m: setattr(m, "array", m.array.reshape(2, 2)),
    "a buffer's dtype": set_data(lambda m: m.kept, lambda d: d.view(torch.int64)),
    "truths as bytes": lambda m: setattr(m, "mask", m.mask.to(torch.uint8)),
    "truths as bytes in place": set_data(
        lambda m: m.mask, lambda d: d.view(torch.uint8)
    ),
    "bytes as truths": lambda m: setattr(m, "mask", m.mask.to(torch.bool)),
    "a tensor wants a gradient": lambda m: setattr(
        m, "held", [integers(4, low=1).requires_grad_(), m.held[1]]
    ),
    "a buffer wants a gradient": lambda m: setattr(
        m, "kept", integers(4).requires_grad_()
    ),
    "a buffer's conjugate": lambda m: setattr(m, "phase", m.phase.conj()),
    "a buffer's conjugate in place": set_data(lambda m: m.phase, lambda d: d.conj()),
    "a parameter's conjugate": set_data(lambda m: m.complex, lambda d: d.conj()),
}


@uses(Holder)
def what_a_module_holds_may_change_in_any_way(model):
    """One wrapper takes all the changes, one after the other."""
    seen = steps(*HELD.values())(model)
    return [*seen, bare(model).held[0].grad]


# ---- structure ----------------------------------------------------------------------


class Parts(nn.Module):
    """Lists and dicts of modules, a buffer, and weights used in two places."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear()])
        self.named = nn.ModuleDict({"a": linear()})
        self.first, self.second = linear(), linear()
        self.register_buffer("shift", integers(3, seed=4))
        self.extra = None
        integer_weights(self, 3)

    def forward(self, x):
        for layer in [*self.layers, *self.named.values(), self.first, self.second]:
            x = layer(x) % 7
        if self.extra is not None:
            x = x * self.extra
        return x if getattr(self, "shift", None) is None else x + self.shift


def _forward_of_its_own(model):
    model.forward = MethodType(lambda self, x: self.first(x) - self.second(x), model)


class Shifted(Parts):
    def forward(self, x):
        return super().forward(x) + 1


def _other_strides(model):
    weight = model.first.weight
    weight.data = integers(3, 3, seed=3).t()


def _assign_state(model):
    other = integer_weights(copy.deepcopy(model), 40)
    model.load_state_dict(other.state_dict(), assign=True)


def _in_place_ema(model):
    torch._foreach_lerp_(
        [p.data for p in model.parameters()],
        [torch.full_like(p, 3) for p in model.parameters()],
        0.0 if model.first.weight.dtype.is_complex else 1.0,
    )


def _from_a_vector(model):
    n_elems = sum(p.numel() for p in model.parameters())
    nn.utils.vector_to_parameters(integers(n_elems, seed=4), model.parameters())


STRUCTURE = {
    "swapped": lambda m: setattr(m, "first", nn.Sequential(linear(), nn.ReLU())),
    "append": lambda m: m.layers.append(integer_weights(linear(), 5)),
    "insert": lambda m: m.layers.insert(0, integer_weights(linear(), 6)),
    "del": lambda m: m.layers.__delitem__(0),
    "a named one more": lambda m: m.named.update({"b": integer_weights(linear(), 2)}),
    "a named one less": lambda m: m.named.pop("a"),
    "frozen": lambda m: m.first.requires_grad_(False),
    "unfrozen": lambda m: m.first.requires_grad_(True),
    "replaced": lambda m: setattr(m.first, "weight", nn.Parameter(integers(3, 3))),
    "added": lambda m: setattr(m, "extra", nn.Parameter(integers(3, seed=2))),
    "removed": lambda m: m.first.register_parameter("bias", None),
    "tied": lambda m: setattr(m.first, "weight", m.second.weight),
    "untied": lambda m: setattr(m.first, "weight", nn.Parameter(integers(3, 3))),
    "strides": _other_strides,
    "assigned": _assign_state,
    "lerp": _in_place_ema,
    "by data": lambda m: [p.data.add_(1) for p in m.parameters()],
    "data anew": lambda m: setattr(m.first.weight, "data", integers(3, 3, seed=8)),
    "a vector": _from_a_vector,
    "buffer in place": lambda m: m.shift.add_(1),
    "buffer anew": lambda m: setattr(m, "shift", integers(3, seed=7)),
    "buffer of another shape": lambda m: setattr(m, "shift", integers(1, seed=7)),
    "buffer deleted": lambda m: delattr(m, "shift"),
    "buffer back": lambda m: m.register_buffer("shift", integers(3), persistent=False),
    "forward": _forward_of_its_own,
    "forward back": lambda m: delattr(m, "forward"),
    "class": lambda m: setattr(m, "__class__", Shifted),
}


trains({"the_structure_may_change_in_any_way": Parts}, steps(*STRUCTURE.values()))

for dtype in (torch.float32, torch.float16, torch.bfloat16):

    @uses(net, {str(dtype): dtype})
    def all_may_be_converted(model, dtype):
        out = model(integers(7, 3))
        bare(model).to(dtype)
        x = integers(7, 3, dtype=dtype, low=-1, high=1)
        model(x).sum().backward()
        return out


class Adapted(nn.Module):
    """A layer with two small matrices beside it, as LoRA has them."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        n_out, n_in = layer.weight.shape
        self.down = nn.Parameter(integers(rank, n_in, seed=2))
        self.up = nn.Parameter(integers(n_out, rank, seed=3))
        self.is_on = {"default": True}

    def forward(self, x):
        out = self.layer(x)
        return out + x @ self.down.T @ self.up.T if self.is_on["default"] else out


def _adapt(model):
    model.requires_grad_(False)
    model[0] = Adapted(model[0])


def _merge(model):
    adapted = model[0]
    with torch.no_grad():
        adapted.layer.weight += adapted.up @ adapted.down
    model[0] = adapted.layer.requires_grad_(True)


trains(
    {"adapters_may_be_added_switched_off_and_merged": net},
    steps(
        _adapt,
        lambda model: model[0].is_on.update(default=False),
        lambda model: model[0].is_on.update(default=True),
        _merge,
    ),
)


@uses(lambda: nn.Sequential(nn.LazyLinear(2), nn.ReLU()).double())
def a_lazy_module_may_be_wrapped_before_its_first_call(model):
    bare(model)(integers(7, 3))
    integer_weights(bare(model))
    return steps()(model)


# ---- weights that are computed ------------------------------------------------------


class Doubled(nn.Module):
    """A parametrization whose numbers are exact."""

    factor = 2

    def forward(self, weight):
        return weight * self.factor

    def right_inverse(self, weight):
        return weight / self.factor


def _parametrize(model):
    parametrize.register_parametrization(model[0], "weight", Doubled())


def _parametrize_the_bias(model):
    parametrize.register_parametrization(model[0], "bias", Doubled())
    parametrize.register_parametrization(model[0], "weight", Doubled())


def _set_factor(model):
    model[0].parametrizations.weight[0].factor = 3


def _remove(model):
    parametrize.remove_parametrizations(model[0], "weight")
    parametrize.remove_parametrizations(model[0], "bias", leave_parametrized=False)


@uses(net)
def parametrizations_come_change_and_go(model):
    changes = _parametrize, _parametrize_the_bias, _set_factor, _remove
    seen = steps(*changes, descend=None)(model)
    assert type(bare(model)[0]) is nn.Linear
    return seen


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
    first = integer_weights(nn.Linear(3, 3))
    return nn.Sequential(first, nn.Tanh(), linear(2))


def computed(model, make):
    torch.manual_seed(3)
    make(model[0])
    return model


def grow(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)


MODES = grow, nn.Module.eval, nn.Module.train

for name, make in MAKES.items():
    compute = functools.partial(computed, make=make)
    trains(
        {f"weights_computed_later[{name}]": three_layers},
        steps(compute, *MODES, descend=None),
        exact=False,
    )
    trains(
        {f"weights_computed_before[{name}]": lambda c=compute: c(three_layers())},
        steps(*MODES, descend=None),
        exact=False,
    )


def _normalize(model):
    torch.manual_seed(3)
    nn.utils.spectral_norm(model[2])


trains(
    {"pruning_ends_with_the_weights_that_are_left": net},
    steps(
        lambda model: prune.l1_unstructured(model[0], "weight", amount=0.5),
        lambda model: prune.remove(model[0], "weight"),
        _normalize,
        lambda model: nn.utils.remove_spectral_norm(model[2]),
        descend=slowly,
    ),
    exact=False,
)
