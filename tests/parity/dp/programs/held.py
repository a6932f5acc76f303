"""Contents of modules: parameters, buffers, other tensors, other parts."""

import weakref

import torch
from replicas import F64, integer_weights, integers, linear, reals
from torch import nn
from torch.nn import functional

from programs import CPU, buffer, module, parameter, program, steps, uses

# ---- parameters ---------------------------------------------------------------------


def asking(seed, rows=((), (1,), (), (6,), (1, 6), ())):
    """Return rows; in some steps, some of them use a layer."""
    x = integers(7, 3, seed=seed)
    x[list(rows[seed % len(rows)]), 0] = 60
    return (x,)


@program(
    cases={
        label: {"use": steps(n=6, x=asking, zero=zeroes)}
        for label, zeroes in (("zeroed", True), ("added up", False))
    },
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
    nothing=buffer(None),
    init=lambda m: m.register_buffer("same", m.several[0]),
)
def parameters_in_every_place_get_gradients(m, x):
    assert m.nothing is None
    x = x * m.scale * m.several[0] + m.several[1] + m.named["shift"] + m.same
    x = torch.cat([x, m.empty]) * m.frozen + m.fixed
    first = next(m.parameters())
    return functional.linear(x, m.turned) * first + sum(p.sum() for p in m.parameters())


@program(steps(x=lambda seed: (reals(7, 3, seed=seed),)), exact=False)
def a_module_without_parameters_passes_gradients_on(m, x):
    return functional.softplus(x)


@program(steps(x=lambda seed: (integers(7, 3, seed=seed), integers(7, 3))))
def an_input_that_is_not_used_has_no_gradient(m, x, y):
    return x


LAYOUTS = {
    "transposed": lambda x, w: x @ w.t().contiguous().t(),
    "summed up": lambda x, w: x * w.sum(),
    "a row of it": lambda x, w: x * w[:, 1],
    "expanded": lambda x, w: (x[:, :, None] * w.expand(2, 3, 4).sum(0)).sum(2),
    "permuted": lambda x, w: torch.einsum("bi,oi->bo", x, w.t()),
}


@program(
    cases={label: {"use_it": use} for label, use in LAYOUTS.items()},
    first=linear(),
    weight=parameter(integers(3, 4)),
)
def gradients_of_any_layout_come_back(m, x):
    return m.use_it(m.first(x), m.weight)


class Scale(nn.Parameter):
    """A parameter of a class that a forward checks."""


def with_a_function(m):
    m.scale.double = lambda tensor: tensor * 2


@program(
    scale=Scale(integers(3)),
    kept=Scale(integers(3, seed=1), requires_grad=False),
    init=with_a_function,
)
def parameters_keep_their_class_and_attributes_in_replicas(m, x):
    is_kind = [isinstance(p, Scale) for p in m.parameters()]
    return m.scale.double(x * m.scale * m.kept * (1 + sum(is_kind)))


class GivesNone(torch.autograd.Function):
    """Adds two tensors; only the first gets a gradient."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@program(table=parameter(integers(8, 8)), last=linear(2))
def a_parameter_may_get_no_gradient_though_it_is_used(m, x):
    return m.last(GivesNone.apply(x, m.table[0, :3]))


# ---- numbers and gradients of every kind ---------------------------------------------


@uses(
    module(
        lambda m, z: (z @ m.weight) * m.scale,
        weight=parameter(torch.complex(integers(3, 2), integers(3, 2, seed=1))),
        scale=parameter(integers(2)),
    )
)
def complex_tensors_and_parameters_work(model):
    z = torch.complex(integers(7, 3), integers(7, 3, seed=3)).requires_grad_()
    out = model(z)
    (out * out.conj()).real.sum().backward()
    return [out, z.grad, model(z.detach().conj())]


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


def rows_of_a_table(seed):
    return (torch.tensor([1, 3, 3, 7, seed, 1, 2]),)


@program(
    cases={
        kind: {
            "table": integer_weights(nn.Embedding(8, 3, sparse=is_sparse)),
            "use": steps(x=rows_of_a_table, n=3, zero=is_sparse),
        }
        for kind, is_sparse in (("sparse", True), ("dense", False))
    },
    last=linear(2),
)
def embeddings_get_the_plain_kind_of_gradient(m, x):
    return m.last(m.table(x))


@program(
    steps(x=lambda seed: (torch.tensor([1, 2, 3, 1, 0, 4, 1, 3, 7]),)),
    {"some dense": {"first_dense": 5}, "all sparse": {"first_dense": 8}},
    table=parameter(integers(8, 3)),
    last=linear(2),
)
def sparse_gradients_of_a_plain_parameter_are_added_up(m, x):
    is_sparse = bool((x < m.first_dense).all())
    return m.last(functional.embedding(x, m.table, sparse=is_sparse))


@program(
    steps(lambda m: m.w.data.add_(1)),
    {
        "method": {"init": lambda m: setattr(m, "way", m.w.sum)},
        "method of a buffer": {"init": lambda m: setattr(m, "way", m.b.sum)},
        "weak reference": {"init": lambda m: setattr(m, "way", weakref.ref(m.w))},
    },
    on=CPU,
    w=parameter(integers(3)),
    b=buffer(integers(3)),
)
def an_attribute_may_lead_to_a_tensor(m, x):
    return x * m.w * m.way().sum()
