"""Forwards that write buffers, statistics, hidden state and attributes."""

import torch
from replicas import F64, bare, integer_weights, integers, linear
from torch import nn
from torch.ao import quantization

from programs import THREE, X, buffer, program, steps, trains, uses


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
    nn.Module.eval,
    nn.Module.train,
    nn.Module.eval,
    n=3,
    exact=False,
    in_parts=True,
    on=THREE,
)


@uses(normed, exact=False, in_parts=True)
def second_gradients_go_through_batch_norm(model, x):
    for _ in range(2):
        (slope,) = torch.autograd.grad(model(x / 4).exp().sum(), x, create_graph=True)
        slope.square().sum().backward()


@program(steps(n=4), layer=linear(), calls=0, last=None, table=None, in_parts=True)
def attributes_that_forward_sets_are_those_of_the_first_replica(m, x):
    m.calls += 1
    if m.table is None:
        m.table = torch.arange(1.0, 4, **F64)
    before, m.last = m.last, x.detach().sum(1)
    return m.layer(x) * m.calls * m.table + (0 if before is None else before[0])


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
    applied(quantization.disable_observer),
    applied(quantization.disable_fake_quant),
    applied(quantization.enable_fake_quant),
    x=floats,
    descends=False,
    call=lambda model, x: model(x).detach(),
    in_parts=True,
)
trains(
    {"a_quantised_module_runs_in_evaluation": converted},
    x=floats,
    needs_grad=False,
    descends=False,
)


@uses(prepared)
def observers_of_quantisation_stay_the_same_objects(model):
    before = {name: id(b) for name, b in bare(model).named_buffers()}
    bare(model).requires_grad_(False)
    model(X[:1].float())
    return {name: id(b) == before[name] for name, b in bare(model).named_buffers()}
