"""Forwards that write buffers, statistics, hidden state and attributes."""

import torch
from replicas import F64, bare, integer_weights, integers, linear, loss_of
from torch import nn
from torch.ao import quantization

from programs import CPU, THREE, X, buffer, parameter, program, steps, trains, uses

# ---- buffers ------------------------------------------------------------------------

ZERO = torch.zeros(1, **F64)
WAYS = {
    "in place": lambda m: m.n.add_(1),
    "through data": lambda m: m.n.data.add_(1),
    "anew": lambda m: setattr(m, "n", m.n + 1),
    "swapped": lambda m: m._buffers.update(n=m.n.clone().add_(1)),
    "copied": lambda m: m.n.copy_(torch.full((1,), float(m.n) + 1, **F64)),
}


@program(
    steps(nn.Module.eval, nn.Module.train, lambda m: m.n.data.zero_()),
    {label: {"count": count} for label, count in WAYS.items()},
    layer=linear(2),
    n=buffer(ZERO),
)
def a_buffer_counts_calls(m, x):
    m.count(m)
    return m.layer(x) * m.n.clone()


def two_in_one(model):
    (loss_of(model(X)) + loss_of(model(X + 1))).backward()


def in_turn(model):
    for loss in [loss_of(model(X)), loss_of(model(X + 1))]:
        loss.backward()


@program(in_turn, layer=linear(), scale=buffer(integers(3)), n=buffer(ZERO))
def a_counter_goes_on_between_two_forwards(m, x):
    m.n += 1
    return m.layer(x) * m.scale


def ten(m):
    m.calls.fill_(10)


def twenty(m):
    m.calls = torch.tensor(20)


@program(
    steps(ten, twenty, n=3),
    calls=buffer(torch.tensor(0)),
    largest=buffer(torch.zeros(3, **F64)),
    replaced=buffer(torch.zeros(2), False),
    first=buffer(None),
    in_parts=True,
    on=THREE,
)
def buffers_of_the_first_replica_survive(m, x):
    m.calls += 1
    m.largest.copy_(x.detach().amax(0))
    m.replaced = torch.full((2,), float(len(x)))
    if m.first is None:
        m.first = x[0].detach() * 2
    return x * m.calls.clone() - m.first


@program(
    two_in_one,
    weight=parameter(integers(3, low=1)),
    scale=buffer(torch.full((3,), 64.0, **F64)),
)
def a_graph_keeps_the_buffer_that_forward_has_replaced(m, x):
    out = x * (m.weight * m.scale)
    m.scale = m.scale * 0.5
    return out


def of_two_names(m):
    m.twice = m.n


def of_another_shape(m):
    m.n = torch.zeros(3, **F64)


@program(
    steps(of_two_names, of_another_shape, n=3),
    layer=linear(),
    n=buffer(ZERO),
    twice=buffer(ZERO),
)
def a_buffer_is_made_anew_in_each_call(m, x):
    m.n = m.n + 1
    m.twice = 2 * m.n
    return m.layer(x) * m.twice[0]


# ---- statistics ---------------------------------------------------------------------


def normed():
    torch.manual_seed(0)
    layers = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


def compiled():
    made = normed()
    made.compile(backend="eager")
    return made


trains(
    {
        "batch_norm_keeps_the_statistics_of_the_first_replica": normed,
        "a_module_compiles_itself": compiled,
    },
    steps(nn.Module.eval, nn.Module.train, nn.Module.eval, n=3),
    exact=False,
    in_parts=True,
    on=THREE,
)


def norm_in_evaluation():
    """Return a normalisation in evaluation, whose numbers are exact."""
    norm = nn.BatchNorm1d(3, eps=0).double().eval()
    norm.running_mean.copy_(integers(3))
    norm.running_var.fill_(4)
    return norm


trains({"batch_norm_in_evaluation_is_exact": norm_in_evaluation})


@uses(normed, exact=False, in_parts=True)
def second_gradients_go_through_batch_norm(model, x):
    for _ in range(2):
        (slope,) = torch.autograd.grad(model(x / 4).exp().sum(), x, create_graph=True)
        slope.square().sum().backward()


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

    def forward(self, x):
        if self.state.shape != x.shape:
            self.state = torch.zeros_like(x)
        self.state = self.state * self.rate + x
        return (self.state > 1) + self.state - self.state.detach()


def of_sizes(model):
    for n in (7, 7, 1, 7):
        loss_of(model(integers(n, 3, seed=n))).backward()


@program(
    of_sizes,
    {
        label: {"neurons": nn.ModuleList([Neuron(is_buffer) for _ in range(2)])}
        for label, is_buffer in (("buffer", True), ("attribute", False))
    },
    first=linear(4),
    last=linear(2, 4),
    exact=False,
    on=CPU,
)
def a_forward_resets_its_hidden_state_and_runs_some_steps(m, x):
    for neuron in m.neurons:
        neuron.state = torch.zeros_like(neuron.state)
    return sum(m.neurons[1](m.last(m.neurons[0](m.first(x)))) for _ in range(3))


# ---- attributes ---------------------------------------------------------------------


@program(steps(n=4), layer=linear(), calls=0, last=None, table=None, in_parts=True)
def attributes_that_forward_sets_are_those_of_the_first_replica(m, x):
    m.calls += 1
    if m.table is None:
        m.table = torch.arange(1.0, 4, **F64)
    before, m.last = m.last, x.detach().sum(1)
    return m.layer(x) * m.calls * m.table + (0 if before is None else before[0])


# ---- observers ----------------------------------------------------------------------


def prepared():
    layers = (nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    stubs = quantization.QuantStub(), quantization.DeQuantStub()
    made = integer_weights(nn.Sequential(stubs[0], *layers, stubs[1]))
    made.float().qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(made.train())


def converted():
    made = prepared()
    made(X.float())
    return quantization.convert(made.eval())


def floats(seed):
    return (integers(7, 3, seed=seed, dtype=torch.float32),)


def applied(change):
    return lambda m: m.apply(change)


trains(
    {"observers_of_quantisation_are_those_of_replica_0": prepared},
    steps(
        applied(quantization.disable_observer),
        applied(quantization.disable_fake_quant),
        applied(quantization.enable_fake_quant),
        x=floats,
        descends=False,
        call=lambda model, x: model(x).detach(),
    ),
    in_parts=True,
)
trains(
    {"a_quantised_module_runs_in_evaluation": converted},
    steps(x=floats, needs_grad=False, descends=False),
)


@uses(prepared)
def observers_of_quantisation_stay_the_same_objects(model):
    before = {name: id(b) for name, b in bare(model).named_buffers()}
    bare(model).requires_grad_(False)
    model(X[:1].float())
    return {name: id(b) == before[name] for name, b in bare(model).named_buffers()}
