"""What modules hold, and where: parameters, buffers, other tensors, other parts."""

import torch
from replicas import (
    F64,
    integer_weights,
    integers,
    linear,
    reals,
)
from torch import nn
from torch.nn import functional

from programs import Made, X, buffer, parameter, program, steps, trains, uses

# ---- parameters ---------------------------------------------------------------------


@program(
    first=linear(),
    second=linear(),
    init=lambda m: setattr(m.second, "weight", m.first.weight),
)
def tied_weights_get_the_sum_of_their_uses(m, x):
    assert m.second.weight is m.first.weight
    return m.second(m.first(x).relu())


def asking(seed, rows=((), (1,), (), (6,), (1, 6), ())):
    """Return rows of which some, in some steps, ask for a layer."""
    x = integers(7, 3, seed=seed)
    x[list(rows[seed % len(rows)]), 0] = 60
    return (x,)


for label, zeroes in {"zeroed": True, "added up": False}.items():

    @program(
        steps(n=6, x=asking, zero=zeroes),
        label=label,
        always=linear(2),
        rarely=linear(2),
        never=linear(2),
    )
    def unused_parameters_keep_no_gradient(m, x):
        out = m.always(x)
        asks = x[:, :1] > 50
        return out + asks * m.rarely(x) if asks.any() else out


@program(
    scale=parameter(torch.tensor(2.0, **F64)),
    empty=parameter(torch.zeros(0, 3, **F64)),
    several=nn.ParameterList([integers(3, seed=s) for s in (1, 2)]),
    named=nn.ParameterDict({"shift": integers(3, seed=3)}),
    frozen=parameter(integers(3, seed=4), trained=False),
    turned=parameter(integers(3, 2, seed=5).T),
    fixed=buffer(integers(3, seed=6)),
)
def parameters_in_every_place_get_gradients(m, x):
    x = x * m.scale * m.several[0] + m.several[1] + m.named["shift"]
    x = torch.cat([x, m.empty]) * m.frozen + m.fixed
    return functional.linear(x, m.turned)


@program(steps(x=lambda seed: (reals(7, 3, seed=seed),)), exact=False)
def a_module_without_parameters_passes_gradients_on(m, x):
    return functional.softplus(x)


@program(layer=linear())
def parameters_found_inside_forward_get_gradients(m, x):
    first = next(m.parameters())
    return x.to(first) @ first.T + sum(p.sum() for p in m.parameters())


trains(
    {"an_input_that_is_not_used_has_no_gradient": lambda: Made(lambda m, x, y: x, {})},
    x=lambda seed: (integers(7, 3, seed=seed), integers(7, 3)),
)

LAYOUTS = {
    "transposed": lambda x, w: x @ w.t().contiguous().t(),
    "summed up": lambda x, w: x * w.sum(),
    "a row of it": lambda x, w: x * w[:, 1],
    "expanded": lambda x, w: (x[:, :, None] * w.expand(2, 3, 4).sum(0)).sum(2),
    "permuted": lambda x, w: torch.einsum("bi,oi->bo", x, w.t()),
}

for label, use in LAYOUTS.items():

    @program(label=label, first=linear(), weight=parameter(integers(3, 4)), use_it=use)
    def gradients_of_any_layout_come_back(m, x):
        return m.use_it(m.first(x), m.weight)


class Scale(nn.Parameter):
    """A parameter of a class that a forward asks for."""


@program(scale=Scale(integers(3)), kept=Scale(integers(3, seed=1), requires_grad=False))
def parameters_keep_their_class_in_replicas(m, x):
    is_kind = [isinstance(p, Scale) for p in m.parameters()]
    return x * m.scale * m.kept * (1 + sum(is_kind))


def own_parameter(m):
    class Own(nn.Parameter):
        pass

    m.layer.weight = Own(m.layer.weight.detach())


def parameter_with_a_function(m):
    m.layer.weight.load = lambda tensor: tensor


for code in (own_parameter, parameter_with_a_function):

    @program(label=code.__name__, layer=linear(), init=code)
    def parameters_may_hold_code_of_the_script(m, x):
        return m.layer(x)


class GivesNone(torch.autograd.Function):
    """Adds two tensors, of which the first gets a gradient."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@program(table=parameter(integers(8, 8)), last=linear(2))
def a_parameter_may_get_no_gradient_though_it_is_used(m, x):
    return m.last(GivesNone.apply(x, m.table[0, :3]))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(integers(3, 3).clone())
        self.same = nn.Parameter(self.first.data)
        self.part = nn.Parameter(self.first.data[:2])

    def forward(self, x):
        return (x @ self.first).square() @ self.same @ self.part.t()


trains({"parameters_may_share_memory": Shared})


# ---- numbers of every kind ----------------------------------------------------------


@uses(lambda: Made(lambda m, z: (z @ m.weight) * m.scale, complex_weights()))
def complex_tensors_and_parameters_work(model):
    z = torch.complex(integers(7, 3), integers(7, 3, seed=3)).requires_grad_()
    out = model(z)
    (out * out.conj()).real.sum().backward()
    return [out, z.grad, model(z.detach().conj())]


def complex_weights():
    weight = torch.complex(integers(3, 2), integers(3, 2, seed=1))
    return {"weight": nn.Parameter(weight), "scale": nn.Parameter(integers(2))}


def lazily(change):
    def of_data(m):
        m.weight.data = change(m.weight.data)

    return of_data


COMPLEX = torch.complex(integers(3), integers(3, seed=1))
LAZY = {"conjugated": (COMPLEX, torch.conj), "negated": (X[0], torch._neg_view)}

for label, (weight, change) in LAZY.items():

    @program(
        steps(lazily(change), lazily(change), n=1, descend=None),
        label=label,
        weight=parameter(weight),
    )
    def a_weight_may_be_a_lazy_view(m, x):
        out = x * m.weight
        return torch.view_as_real(out).sum(-1) if out.is_complex() else out


class NegatedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch._neg_view(grad.clone())


@program(weight=parameter(integers(3)))
def gradients_that_are_lazily_negated_keep_their_sign(m, x):
    return x * NegatedGradient.apply(m.weight)


@program(
    real=parameter(torch.tensor(2.0, **F64)), imag=parameter(torch.tensor(3.0, **F64))
)
def the_imaginary_part_of_a_conjugate_is_trained(m, x):
    out = torch.complex(x, x + 1) * torch.complex(m.real, m.imag).conj()
    return torch.view_as_real(out.resolve_conj())


def small_integers(dtype):
    return lambda seed: (integers(7, 3, seed=seed, low=-1, high=1).to(dtype),)


for dtype in (torch.float16, torch.bfloat16):
    trains(
        {f"sixteen_bits_are_exact[{dtype}]": lambda dtype=dtype: linear().to(dtype)},
        x=small_integers(dtype),
        call=lambda model, x: model(x).sum(),
        descend=None,
    )


# ---- sparse gradients ---------------------------------------------------------------


def rows_of_a_table(seed):
    return (torch.tensor([1, 3, 3, 7, seed, 1, 2]),)


for is_sparse in (False, True):

    @program(
        steps(x=rows_of_a_table, n=3, zero=is_sparse),
        label="sparse" if is_sparse else "dense",
        table=integer_weights(nn.Embedding(8, 3, sparse=is_sparse)),
        last=linear(2),
    )
    def embeddings_get_the_plain_kind_of_gradient(m, x):
        return m.last(m.table(x))


for first_dense in (8, 5):

    @program(
        steps(x=lambda seed: (torch.tensor([1, 2, 3, 1, 0, 4, 1, 3, 7]),)),
        label="some dense" if first_dense == 5 else "all sparse",
        table=parameter(integers(8, 3)),
        last=linear(2),
        first_dense=first_dense,
    )
    def sparse_gradients_of_a_plain_parameter_are_added_up(m, x):
        is_sparse = bool((x < m.first_dense).all())
        return m.last(functional.embedding(x, m.table, sparse=is_sparse))


# ---- buffers ------------------------------------------------------------------------


def share_a_table(m):
    m.x, m.y = nn.Module(), nn.Module()
    table = integers(3)
    m.x.register_buffer("table", table)
    m.y.register_buffer("table", table)


for order in ("xy", "yx", "y", "xx"):
    parts = [
        change
        for seed, owner in enumerate(order, start=5)
        for change in (
            lambda m, o=owner, s=seed: setattr(
                getattr(m, o), "table", integers(3, seed=s)
            ),
            lambda m, o=owner: getattr(m, o).table.add_(1),
        )
    ]

    @program(steps(*parts, n=1), label=order, layer=linear(), init=share_a_table)
    def owners_of_one_buffer_may_part(m, x):
        return m.layer(x) * m.x.table + m.y.table


BUFFERS = {
    "gaps": lambda: torch.ones(4, 6)[:, :3],
    "repeats": lambda: torch.ones(1, 3).expand(2, 3),
    "steps": lambda: torch.ones(4, 3)[::2],
    "a column": lambda: torch.ones(4, 3)[:, 1],
    "transposed, with steps": lambda: torch.arange(12.0).view(3, 4).t()[::2],
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "of no known type": lambda: torch.ones(2, dtype=torch.uint16),
}


def add_to_it(m):
    if m.odd.dtype == torch.float32 and m.odd.stride()[0] != 0:
        m.odd += 3


def other_layouts(m):
    m.odd, m.dense = torch.full((4,), 5.0), torch.ones(8)[::2]


for label, make in BUFFERS.items():

    @program(
        steps(add_to_it, other_layouts, lambda m: m.dense.mul_(3), n=1),
        label=label,
        dense=buffer(torch.ones(3)),
        init=lambda m, make=make: m.register_buffer("odd", make()),
    )
    def buffers_of_every_layout_reach_every_replica(m, x):
        return x + m.dense.sum() + m.odd.double().sum()


@program(
    layer=linear(2),
    nothing=buffer(None),
    init=lambda m: m.register_buffer("bias", m.layer.bias),
)
def a_buffer_may_be_none_or_a_parameter(m, x):
    assert m.nothing is None
    return m.layer(x) + m.bias
