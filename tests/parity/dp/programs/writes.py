"""Forwards that write parameters and buffers, or make them require a gradient.

What replica 0 writes stays, so the next step computes with it; what the others write
goes to their copies and is lost.  Where a forward writes the same whatever its rows
are, that is the plain module on all rows.
"""

import torch
from replicas import F64, bare, integer_weights, integers, linear
from torch import nn

from programs import (
    CPU,
    THREE,
    X,
    buffer,
    parameter,
    program,
    slowly,
    steps,
    trains,
    uses,
)

# ---- parameters ---------------------------------------------------------------------


def switch_on(m):
    m.is_writing = True


def writing(label="", *, n_before=(0, 2), **options):
    """Add a row whose forward writes if `m.is_writing`: from the first call, later."""

    def add(code):
        for n in n_before:
            use = steps(switch_on, *[lambda m: None] * 3, n=n)
            when = f"{label} {'later' if n else 'at once'}".strip()
            program(use, label=when, is_writing=False, **options)(code)
        return code

    return add


@torch.no_grad()
def in_place(q, k):
    k.mul_(0.5).add_(q, alpha=0.5)


def by_data(q, k):
    k.data = k.data * 0.5 + q.data * 0.5


def inside_data(q, k):
    k.data.mul_(0.5).add_(q.data, alpha=0.5)


@torch.no_grad()
def by_copy(q, k):
    k.copy_(torch.lerp(q, k, 0.5))


def by_numpy(q, k):
    array = k.detach().numpy()
    array *= 0.5
    array += q.detach().numpy() * 0.5


for follow in (in_place, by_data, inside_data, by_copy, by_numpy):
    for is_paired in (False, True) if follow is in_place else (False,):

        @writing(
            f"{follow.__name__}{', by a list of pairs' if is_paired else ''}",
            query=linear(2),
            key=linear(2).requires_grad_(False),
            init=lambda m: setattr(m, "pairs", [[m.query, m.key]]),
            follow=follow,
            is_paired=is_paired,
        )
        def a_momentum_encoder_follows_once_a_call(m, x):
            for query, key in m.pairs if m.is_paired else [(m.query, m.key)]:
                for q, k in zip(query.parameters(), key.parameters(), strict=True):
                    if m.is_writing:
                        m.follow(q, k)
            return m.query(x) * m.key(x)


@writing(layer=linear(2), n=parameter(torch.tensor(0), trained=False), on=THREE)
def calls_are_counted_in_a_frozen_parameter(m, x):
    if m.is_writing:
        m.n += 1
    return m.layer(x) * m.n


@writing(
    layer=linear(2),
    codes=parameter(integers(4, 2, seed=3), trained=False),
    in_parts=True,
    on=THREE,
)
def a_codebook_moves_towards_the_rows_that_it_saw(m, x):
    z = m.layer(x)
    nearest = torch.cdist(z.detach(), m.codes).argmin(1)
    out = z + m.codes[nearest]
    if m.is_writing:
        with torch.no_grad():
            m.codes.index_add_(0, nearest, z.round())
    return out


@writing(layer=linear(2), codes=parameter(integers(4, 2), trained=False), in_parts=True)
def a_codebook_is_made_anew(m, x):
    out = m.layer(x) + m.codes.sum(0)
    if m.is_writing:
        m.codes = nn.Parameter(m.codes.detach() + 1, requires_grad=False)
    return out


def clip(p):
    p.data.clamp_(-1, 1)


def clip_by_numpy(p):
    array = p.detach().numpy()
    array.clip(-1, 1, out=array)


for clips in (clip, clip_by_numpy):

    @writing(clips.__name__, layer=linear(2), clips=clips, in_parts=True)
    def trained_weights_are_clipped_before_they_are_used(m, x):
        if m.is_writing:
            for p in m.layer.parameters():
                m.clips(p)
        return m.layer(x)


@writing(layer=linear(2), in_parts=True, on=THREE)
def weights_are_clipped_by_what_the_rows_are(m, x):
    if m.is_writing:
        with torch.no_grad():
            m.layer.weight.clamp_(max=float(len(x) % 3))
    return m.layer(x)


@writing(
    rnn=integer_weights(nn.RNN(3, 2, nonlinearity="relu", batch_first=True)),
    in_parts=True,
)
def a_weight_is_written_that_lies_in_a_list_too(m, x):
    if m.is_writing:
        with torch.no_grad():
            m.rnn.weight_ih_l0.add_(1.0)
    return m.rnn(x[:, None] % 3)[0][:, 0]


def tie(m):
    m.second.weight = m.first.weight


@writing(first=linear(), second=linear(), init=tie, in_parts=True)
def a_weight_is_written_that_two_parts_have(m, x):
    if m.is_writing:
        with torch.no_grad():
            m.first.weight.clamp_(-1, 1)
    return m.second(m.first(x))


def nines(seed):
    x = integers(7, 3, seed=seed)
    x[1:, 0] = 9
    return (x,)


@program(
    steps(x=nines),
    layer=linear(2),
    n=parameter(torch.tensor(0), trained=False),
    in_parts=True,
)
def a_write_of_another_replica_alone_is_lost(m, x):
    if x[0, 0] == 9:
        m.n += 1
    return m.layer(x) * m.n


@program(
    layer=linear(),
    weight=parameter(integers(3)),
    init=lambda m: setattr(m.weight, "mark", 2),
)
def copies_are_parameters_with_their_attributes(m, x):
    assert isinstance(m.weight, nn.Parameter)
    assert len(list(m.parameters())) == 3
    return m.layer(x) + m.weight * m.weight.mark


@program(
    steps(descend=slowly),
    inner=nn.Sequential(linear(4), nn.Tanh(), linear(2, 4)),
    mean=parameter(torch.zeros(2, **F64)),
    exact=False,
)
def a_parameter_that_is_written_leaves_its_neighbours_alone(m, x):
    """They lie in one block on GPUs, and graphs have saved them."""
    out = m.inner(x)
    with torch.no_grad():
        m.mean.mul_(0.5).add_(1)
    return out


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(integers(3, 2))
        self.n = nn.Parameter(torch.zeros(1, dtype=torch.float64), False)

    def forward(self, x):
        self.n.add_(1)
        return x @ self.weight * self.n


trains({"a_script_writes_its_parameters": lambda: torch.jit.script(Scripted())}, on=CPU)


# ---- tensors that a forward makes require a gradient --------------------------------

for name in ("codes", "frozen"):
    for label, is_late in (("first call", False), ("later", True)):

        @program(
            steps(*[nn.Module.train] * 3, n=1, descend=None, zero=False),
            label=f"{name}, {label}",
            on=THREE,
            layer=linear(),
            codes=buffer(integers(3)),
            frozen=parameter(integers(3, seed=1), trained=False),
            name=name,
            init=nn.Module.eval if is_late else None,
        )
        def a_tensor_that_forward_thaws_collects_the_plain_gradient(m, x):
            if m.training:
                getattr(m, m.name).requires_grad_()
            return m.layer(x * m.codes + m.frozen)


@program(
    lambda model: [torch.no_grad()(model)(X), bare(model).codes.grad],
    layer=linear(),
    codes=buffer(integers(3)),
)
def a_tensor_that_forward_thaws_without_gradients_has_none(m, x):
    m.codes.requires_grad_()
    return m.layer(x * m.codes)


@program(codes=buffer(integers(3).requires_grad_()))
def a_trained_buffer_requires_its_gradient_in_every_replica(m, x):
    return x * (1 + float(m.codes.requires_grad))


@program(layer=linear(), moving=buffer(integers(3).requires_grad_()))
def a_buffer_that_requires_a_gradient_gets_it(m, x):
    return m.layer(x * m.moving)


@program(
    steps(n=1, evaluates=False), layer=linear(2), shift=buffer(torch.zeros(2, **F64))
)
def a_buffer_becomes_part_of_a_graph_in_place(m, x):
    m.shift.add_(m.layer.bias)
    return m.layer(x) + m.shift.mul(1)


# ---- weights that lookups write -----------------------------------------------------


def indices(seed):
    return (integers(7, 3, seed=seed, low=0, high=8).long(),)


TABLES = {
    "embedding": nn.Embedding(9, 2, max_norm=1.0),
    "largest entry": nn.Embedding(9, 2, max_norm=1.5, norm_type=float("inf")),
    "bag": nn.EmbeddingBag(9, 2, max_norm=1.0, mode="sum"),
}


def tie_the_table(m):
    m.out.weight = m.table.weight


for label, table in TABLES.items():
    for is_tied in (False, True):

        @program(
            steps(x=indices, n=3),
            label=f"{label}{', tied' if is_tied else ''}",
            table=integer_weights(table, 5),
            out=integer_weights(nn.Linear(2, 9, bias=False)),
            init=tie_the_table if is_tied else None,
        )
        def a_lookup_with_a_largest_norm_has_the_bits_of_the_plain_module(m, x):
            return m.out(m.table(x))


for how in ("set", "replaced"):

    def limit(m, how=how):
        if how == "replaced":
            m.table = nn.Embedding(9, 3, _weight=integers(9, 3))
        m.table.max_norm = 0.5

    @program(
        steps(limit, x=lambda seed: (indices(seed)[0][:, 0],)),
        label=how,
        table=integer_weights(nn.Embedding(9, 3)),
        out=linear(2),
    )
    def a_largest_norm_may_come_after_wrapping(m, x):
        return m.out(m.table(x))


# ---- models of inference mode -------------------------------------------------------


def of_inference_mode():
    with torch.inference_mode():
        return integer_weights(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))).eval()


@uses(of_inference_mode)
def a_model_of_inference_mode_stays_whole(model):
    seen = []
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with torch.inference_mode():
            inner = X.clone()
        for rows in (inner, X):
            with mode():
                seen += [model(rows).tolist(), bare(model)(rows).tolist()]
    return seen
