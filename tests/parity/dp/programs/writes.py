"""Forwards that write to parameters and buffers, or make them require a gradient.

Writes of replica 0 stay, so the next step computes with them; writes of the others go
to copies and are lost.  A forward that writes the same values whatever its rows are
equals the plain module on all rows.
"""

import torch
from replicas import F64, bare, here, integer_weights, integers, linear
from torch import nn

from programs import CPU, THREE, X, buffer, parameter, program, steps, trains, uses

# ---- parameters ---------------------------------------------------------------------


def switch_on(m):
    m.is_writing = True


def writing(label="", **given):
    """Add rows whose forward writes if `m.is_writing`: at once, and later."""
    cases = {
        f"{label} {when}".strip(): {"use": steps(switch_on, *[lambda m: None] * 3, n=n)}
        for when, n in (("at once", 0), ("later", 2))
    }
    return program(cases=cases, is_writing=False, **given)


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


def clip(p, most):
    p.data.clamp_(-most, most)


def clip_by_numpy(p, most):
    array = p.detach().numpy()
    array.clip(-most, most, out=array)


for clips in (clip, clip_by_numpy):

    @writing(clips.__name__, layer=linear(2), clips=clips, in_parts=True, on=THREE)
    def trained_weights_are_clipped_by_what_the_rows_are(m, x):
        if m.is_writing:
            for p in m.layer.parameters():
                m.clips(p, 1 + (len(x) == 3))
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
    steps(),
    inner=nn.Sequential(linear(4), nn.Tanh(), linear(2, 4)),
    mean=parameter(torch.zeros(2, **F64)),
    exact=False,
)
def a_parameter_that_is_written_leaves_its_neighbours_alone(m, x):
    """On GPUs they lie in one block, and graphs have saved them."""
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


@program(
    lambda model: [torch.no_grad()(model)(X), bare(model).codes.grad],
    layer=linear(),
    codes=buffer(integers(3)),
)
def a_tensor_that_forward_thaws_without_gradients_has_none(m, x):
    m.codes.requires_grad_()
    return m.layer(x * m.codes)


@program(layer=linear(), moving=buffer(integers(3).requires_grad_()))
def a_buffer_that_requires_a_gradient_gets_it(m, x):
    return m.layer(x * m.moving) * (1 + float(m.moving.requires_grad))


@program(
    steps(n=1, evaluates=False), layer=linear(2), shift=buffer(torch.zeros(2, **F64))
)
def a_buffer_becomes_part_of_a_graph_in_place(m, x):
    m.shift.add_(m.layer.bias)
    return m.layer(x) + m.shift.mul(1)


# ---- weights that lookups write ------------------------------------------------------


def indices(seed):
    return (integers(7, 3, seed=seed, low=0, high=8).long(),)


TABLES = {
    "embedding": nn.Embedding(9, 2, max_norm=1.0),
    "largest entry": nn.Embedding(9, 2, max_norm=1.5, norm_type=float("inf")),
    "bag": nn.EmbeddingBag(9, 2, max_norm=1.0, mode="sum"),
}


def tie_the_table(m):
    m.out.weight = m.table.weight


@program(
    steps(x=indices, n=3),
    {
        f"{label}{end}": {"table": integer_weights(table, 5), "init": init}
        for label, table in TABLES.items()
        for end, init in (("", None), (", tied", tie_the_table))
    },
    out=integer_weights(nn.Linear(2, 9, bias=False)),
)
def a_lookup_with_a_largest_norm_has_the_bits_of_the_plain_module(m, x):
    return m.out(m.table(x))


def limit(m):
    m.table.max_norm = 0.5


def replace(m):
    m.table = nn.Embedding(9, 3, _weight=integers(9, 3), max_norm=0.5)


@program(
    cases={
        change.__name__: {"use": steps(change, x=lambda s: (indices(s)[0][:, 0],))}
        for change in (limit, replace)
    },
    table=integer_weights(nn.Embedding(9, 3)),
    out=linear(2),
)
def a_largest_norm_may_come_after_wrapping(m, x):
    return m.out(m.table(x))


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
                seen += [model(rows).tolist(), bare(model)(here(model, rows)).tolist()]
    return seen
