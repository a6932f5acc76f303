"""What may change between two calls: every replica follows."""

import copy
import functools
from types import MethodType, SimpleNamespace

import numpy as np
import torch
from replicas import bare, grow, integer_weights, integers, linear, net
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from programs import Made, buffer, module, parameter, program, steps, trains, uses

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


def in_a_row(m, x):
    for layer in [*m.layers, *m.named.values(), m.first, m.second]:
        x = layer(x) % 7
    if m.extra is not None:
        x = x * m.extra
    return x if getattr(m, "shift", None) is None else x + m.shift


class Shifted(Made):
    def forward(self, x):
        return super().forward(x) + 1


def own_forward(m):
    m.forward = MethodType(lambda self, x: self.first(x) - self.second(x), m)


def assign_state(m):
    other = integer_weights(copy.deepcopy(m), 40)
    m.load_state_dict(other.state_dict(), assign=True)


def lerp(m):
    weights = [p.data for p in m.parameters()]
    torch._foreach_lerp_(weights, [torch.full_like(p, 3) for p in weights], 1.0)


def from_a_vector(m):
    n_elems = sum(p.numel() for p in m.parameters())
    nn.utils.vector_to_parameters(integers(n_elems, seed=4), m.parameters())


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
    "strides": set_data(lambda m: m.first.weight, lambda d: integers(3, 3, seed=3).t()),
    "assigned": assign_state,
    "lerp": lerp,
    "by data": lambda m: [p.data.add_(1) for p in m.parameters()],
    "data anew": set_data(lambda m: m.first.weight, lambda d: integers(3, 3, seed=8)),
    "a vector": from_a_vector,
    "buffer in place": lambda m: m.shift.add_(1),
    "buffer anew": lambda m: setattr(m, "shift", integers(3, seed=7)),
    "buffer of another shape": lambda m: setattr(m, "shift", integers(1, seed=7)),
    "buffer deleted": lambda m: delattr(m, "shift"),
    "buffer back": lambda m: m.register_buffer("shift", integers(3), persistent=False),
    "forward": own_forward,
    "forward back": lambda m: delattr(m, "forward"),
    "class": lambda m: setattr(m, "__class__", Shifted),
}


@program(
    steps(*STRUCTURE.values()),
    layers=nn.ModuleList([linear(), linear()]),
    named=nn.ModuleDict({"a": linear()}),
    first=linear(),
    second=linear(),
    shift=buffer(integers(3, seed=4)),
    extra=None,
    init=lambda m: integer_weights(m, 3),
)
def the_structure_may_change_in_any_way(m, x):
    return in_a_row(m, x)


@uses(net, [torch.float32, torch.float16, torch.bfloat16])
def all_may_be_converted(model, dtype):
    out = model(integers(7, 3))
    bare(model).to(dtype)
    x = integers(7, 3, dtype=dtype, low=-1, high=1)
    model(x).sum().backward()
    return out


def adapted(m, x):
    """Compute a layer with two small matrices beside it, as LoRA has them."""
    out = m.layer(x)
    return out + x @ m.down.T @ m.up.T if m.is_on["default"] else out


def adapt(m):
    m.requires_grad_(False)
    down, up = parameter(integers(2, 3, seed=2)), parameter(integers(4, 2, seed=3))
    m[0] = module(adapted, layer=m[0], down=down, up=up, is_on={"default": True})


def merge(m):
    m[0].layer.weight.data += m[0].up.data @ m[0].down.data
    m[0] = m[0].layer.requires_grad_(True)


trains(
    {"adapters_may_be_added_switched_off_and_merged": net},
    steps(
        adapt,
        lambda m: m[0].is_on.update(default=False),
        lambda m: m[0].is_on.update(default=True),
        merge,
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
    steps(
        parametrize_the("weight"),
        parametrize_the("bias", "weight"),
        set_factor,
        remove,
        descends=False,
    ),
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
    before = {f"weights_computed_before[{name}]": lambda c=compute: c(three_layers())}
    later = {f"weights_computed_later[{name}]": three_layers}
    trains(before, steps(*MODES, descends=False), exact=False)
    trains(later, steps(compute, *MODES, descends=False), exact=False)


def normalize(m):
    torch.manual_seed(3)
    nn.utils.spectral_norm(m[2])


trains(
    {"pruning_ends_with_the_weights_that_are_left": net},
    steps(
        lambda m: prune.l1_unstructured(m[0], "weight", amount=0.5),
        lambda m: prune.remove(m[0], "weight"),
        normalize,
        lambda m: nn.utils.remove_spectral_norm(m[2]),
    ),
    exact=False,
)
