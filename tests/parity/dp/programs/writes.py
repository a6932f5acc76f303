"""Forwards that write parameters and buffers, or make them require a gradient.

What replica 0 writes stays, so the next step computes with it; what the others write
goes to their copies and is lost.  Where a forward writes the same whatever its rows
are, that is the plain module on all rows.
"""

import torch
from replicas import F64, bare, integer_weights, integers, linear, loss_of
from torch import nn
from torch.ao import quantization

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


# ---- buffers ------------------------------------------------------------------------

WAYS = {
    "in place": lambda m: m.n.add_(1),
    "through data": lambda m: m.n.data.add_(1),
    "anew": lambda m: setattr(m, "n", m.n + 1),
    "swapped": lambda m: m._buffers.update(n=m.n.clone().add_(1)),
    "copied": lambda m: m.n.copy_(torch.full((1,), float(m.n) + 1, **F64)),
}

for label, count in WAYS.items():

    @program(
        steps(nn.Module.eval, nn.Module.train, lambda m: m.n.data.zero_()),
        label=label,
        layer=linear(2),
        n=buffer(torch.zeros(1, **F64)),
        count=count,
    )
    def a_buffer_counts_calls(m, x):
        m.count(m)
        return m.layer(x) * m.n.clone()


def ten(m):
    m.calls.fill_(10)


def twenty(m):
    m.calls = torch.tensor(20)


@program(
    steps(ten, twenty, n=3),
    calls=buffer(torch.tensor(0)),
    largest=buffer(torch.zeros(3, **F64)),
    replaced=buffer(torch.zeros(2), False),
    nothing=buffer(None),
    in_parts=True,
    on=THREE,
)
def buffers_of_the_first_replica_survive(m, x):
    m.calls += 1
    m.largest.copy_(x.detach().amax(0))
    m.replaced = torch.full((2,), float(len(x)))
    return x * m.calls.clone()


@program(
    lambda model: [loss_of(model(X)) + loss_of(model(X + 1))][0].backward(),
    weight=parameter(integers(3, low=1)),
    scale=buffer(torch.full((3,), 64.0, **F64)),
)
def a_graph_keeps_the_buffer_that_forward_has_replaced(m, x):
    out = x * (m.weight * m.scale)
    m.scale = m.scale * 0.5
    return out


@program(
    steps(lambda m: setattr(m, "first", integers(3, seed=2))),
    layer=linear(),
    first=buffer(None),
    in_parts=True,
)
def a_buffer_made_in_forward_is_that_of_the_first_replica(m, x):
    if m.first is None:
        m.first = x[0].detach() * 2
    return m.layer(x) - m.first


def of_two_names(m):
    m.twice = m.n


def of_another_shape(m):
    m.n = torch.zeros(3, **F64)


@program(
    steps(of_two_names, of_another_shape, n=3),
    layer=linear(),
    n=buffer(torch.zeros(1, **F64)),
    twice=buffer(torch.zeros(1, **F64)),
)
def a_buffer_is_made_anew_in_each_call(m, x):
    m.n = m.n + 1
    m.twice = 2 * m.n
    return m.layer(x) * m.twice[0]


def normed():
    torch.manual_seed(0)
    layers = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


trains(
    {"batch_norm_keeps_the_statistics_of_the_first_replica": normed},
    exact=False,
    in_parts=True,
    on=THREE,
    use=steps(nn.Module.eval, nn.Module.train, nn.Module.eval, n=3, descend=slowly),
)


def norm_in_evaluation():
    """Return a normalisation in evaluation, whose numbers are exact."""
    norm = nn.BatchNorm1d(3, eps=0).double().eval()
    norm.running_mean.copy_(integers(3))
    norm.running_var.fill_(4)
    return norm


trains({"batch_norm_in_evaluation_is_exact": norm_in_evaluation})


@uses(normed, exact=False, in_parts=True)
def second_gradients_go_through_batch_norm(model):
    seen = []
    for seed in range(2):
        x = integers(7, 3, seed=seed).requires_grad_()
        (slope,) = torch.autograd.grad(model(x / 4).exp().sum(), x, create_graph=True)
        slope.square().sum().backward()
        seen.append(x.grad)
    return seen


def compiled():
    made = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)).double()
    made.compile(backend="eager")
    return made


trains({"a_module_compiles_itself": compiled}, exact=False, in_parts=True)


# ---- hidden state -------------------------------------------------------------------


class Neuron(nn.Module):
    """Has a membrane that decays, spikes, and begins with the shape of its input."""

    def __init__(self, is_buffer):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.5, **F64))
        start = torch.zeros(0, **F64)
        if is_buffer:
            self.register_buffer("state", start, persistent=False)
        else:
            self.state = start

    def reset(self):
        self.state = torch.zeros_like(self.state)

    def forward(self, x):
        if self.state.shape != x.shape:
            self.state = torch.zeros_like(x)
        self.state = self.state * self.rate + x
        return (self.state > 1) + self.state - self.state.detach()


for is_buffer in (True, False):

    @program(
        lambda model: (
            [loss_of(model(integers(n, 3, seed=n))).backward() for n in (7, 7, 1, 7)]
            and None
        ),
        label="buffer" if is_buffer else "attribute",
        first=linear(4),
        last=linear(2, 4),
        neurons=nn.ModuleList([Neuron(is_buffer) for _ in range(2)]),
        exact=False,
        on=CPU,
    )
    def a_forward_resets_its_hidden_state_and_runs_some_steps(m, x):
        for neuron in m.neurons:
            neuron.reset()
        return sum(m.neurons[1](m.last(m.neurons[0](m.first(x)))) for _ in range(3))


# ---- attributes ---------------------------------------------------------------------


@program(steps(n=4), layer=linear(), calls=0, last=None, in_parts=True)
def attributes_that_forward_sets_are_those_of_the_first_replica(m, x):
    m.calls += 1
    before, m.last = m.last, x.detach().sum(1)
    return m.layer(x) * m.calls + (0 if before is None else before[0])


@program(layer=linear(), table=None)
def a_table_is_made_in_the_first_call_and_kept(m, x):
    if m.table is None:
        m.table = torch.arange(1.0, 4, **F64)
    return m.layer(x) * m.table


# ---- observers ----------------------------------------------------------------------


def prepared():
    layers = (nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    stubs = quantization.QuantStub(), quantization.DeQuantStub()
    made = integer_weights(nn.Sequential(stubs[0], *layers, stubs[1]))
    made.float().qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(made.train())


def floats(seed):
    return (integers(7, 3, seed=seed, dtype=torch.float32),)


def unobserved(m):
    m.apply(quantization.disable_observer)


def unquantised(m):
    m.apply(quantization.disable_fake_quant)


def quantised(m):
    m.apply(quantization.enable_fake_quant)


trains(
    {"observers_of_quantisation_are_those_of_replica_0": prepared},
    steps(
        unobserved,
        unquantised,
        quantised,
        x=floats,
        descend=None,
        call=lambda model, x: model(x).detach(),
    ),
    in_parts=True,
)


@uses(prepared)
def observers_of_quantisation_stay_the_same_objects(model):
    before = {name: id(b) for name, b in bare(model).named_buffers()}
    for p in bare(model).parameters():
        p.requires_grad_(False)
    model(floats(0)[0][:1])
    return {name: id(b) == before[name] for name, b in bare(model).named_buffers()}


def converted():
    made = prepared()
    made(floats(0)[0])
    return quantization.convert(made.eval())


trains(
    {"a_quantised_module_runs_in_evaluation": converted},
    steps(x=floats, needs_grad=False, descend=None),
)
