"""Modules of many kinds: scripts, compiled, exported, quantised."""

import copy

import pytest
import torch
import torch.ao.quantization as quantization
from replicas import (
    Twin,
    assert_close,
    assert_same_grads,
    assert_same_state,
    integer_weights,
    integers,
    linear,
    loss_of,
    net,
    step,
)
from torch import nn


class Holder(nn.Module):
    """Has a layer of its own beside an inner module, which it may run twice."""

    def __init__(self, inner, is_shared=False):
        super().__init__()
        self.linear = linear()
        self.inner = inner
        if is_shared:
            self.again = inner

    def forward(self, x):
        out = self.linear(x) + self.inner(x)
        return out + self.again(x) if hasattr(self, "again") else out


def inner():
    return linear()


def exported():
    rows = torch.export.Dim("rows")
    shapes = ({0: rows},)
    program = torch.export.export(net(), (integers(7, 3),), dynamic_shapes=shapes)
    return program.module()


def compiled_in_place():
    module = Holder(inner())
    module.compile(backend="eager")
    module.inner.compile(backend="eager")
    return module


KINDS = {
    "a script": lambda: torch.jit.script(net()),
    "a script inside": lambda: Holder(torch.jit.script(inner())),
    "a shared script": lambda: Holder(torch.jit.script(inner()), True),
    "a trace": lambda: torch.jit.trace(net(), integers(7, 3)),
    "a trace inside": lambda: Holder(torch.jit.trace(inner(), integers(7, 3))),
    "compiled": lambda: torch.compile(net(), backend="eager"),
    "compiled inside": lambda: Holder(torch.compile(inner(), backend="eager")),
    "compiled in place": compiled_in_place,
    "a graph": lambda: torch.fx.symbolic_trace(Holder(inner())),
    "exported": exported,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_module_of_this_kind_trains_as_the_plain_one(wrap, make):
    plain, module = make(), make()
    ours = wrap(module)
    for seed in range(3):
        losses = [step(model, integers(7, 3, seed=seed)) for model in (ours, plain)]
        for loss in losses:
            loss.backward()
        assert_close(*losses)
        assert_same_grads(ours, plain)
        for model in (plain, module):
            with torch.no_grad():
                for p in model.parameters():
                    p -= 2 * p.grad.sign()


def test_replica_0_of_a_script_shares_its_storage(wrap):
    module = torch.jit.script(net())
    before = [p.data_ptr() for p in module.parameters()]
    ours = wrap(module)
    with torch.no_grad():
        first, second = ours.replicate(module, ours.device_ids)
        assert [p.data_ptr() for p in first.parameters()] == before
        assert torch.equal(second(integers(7, 3)), module(integers(7, 3)))
        ours(integers(7, 3))
    assert [p.data_ptr() for p in module.parameters()] == before


def test_statistics_of_a_compiled_part_are_those_of_the_first_replica(wrap):
    layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    plain = integer_weights(layers)
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    models = [wrap(compiled), wrap(copy.deepcopy(plain))]
    for _ in range(2):
        assert torch.equal(*(model(integers(7, 3)) for model in models))
        plain(integers(7, 3)[:4])
    assert_same_state(compiled._orig_mod, plain)


# ---- torch.compile, round the wrapper -----------------------------------------------


def _compile(wrapper):
    return torch.compile(wrapper, backend="eager")


def _compile_in_place(wrapper):
    wrapper.compile(backend="eager")
    return wrapper


def _compile_module_later(wrapper):
    wrapper(integers(7, 3))
    wrapper.module.compile(backend="eager")
    return wrapper


def _compile_round(wrapper):
    return torch.compile(lambda x: wrapper(x * 1) + 0, backend="eager")


COMPILES = [_compile, _compile_in_place, _compile_module_later, _compile_round]


@pytest.mark.parametrize("compiles", COMPILES, ids=lambda how: how.__name__[1:])
def test_a_compiled_wrapper_trains_as_the_plain_module(wrap, compiles):
    torch._dynamo.reset()
    twin = Twin(wrap, net())
    compiled = compiles(twin.ours)
    for seed in range(2):
        x = integers(7, 3, seed=seed)
        for model in (compiled, twin.plain):
            loss_of(model(x)).backward()
        assert_same_grads(twin.ours, twin.plain)


def test_a_full_graph_of_a_wrapper_is_refused_by_the_compiler(wrap):
    torch._dynamo.reset()
    compiled = torch.compile(wrap(net()), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_call_in_replicas"):
        compiled(integers(7, 3))


# ---- quantisation -------------------------------------------------------------------


def prepared():
    module = nn.Sequential(
        quantization.QuantStub(),
        nn.Linear(3, 4),
        nn.ReLU(),
        nn.Linear(4, 2),
        quantization.DeQuantStub(),
    )
    integer_weights(module, dtype=torch.float32)
    module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(module.train())


@pytest.mark.filterwarnings("ignore")
def test_observers_of_quantisation_stay_the_same_and_are_replica_0s(wrap):
    module = prepared()
    plain = copy.deepcopy(module)
    objects = {name: id(buffer) for name, buffer in module.named_buffers()}
    x = integers(7, 3, dtype=torch.float32)
    ours = wrap(module)
    for seed in range(2):
        x = integers(7, 3, seed=seed, dtype=torch.float32)
        ours(x).sum().backward()
        plain(x[:4])
        assert_same_state(ours, plain)
    assert {name: id(b) for name, b in module.named_buffers()} == objects
    for model in (module, plain):
        model.apply(quantization.disable_observer)
    ours(5 * x)
    assert_same_state(ours, plain)
    assert torch.equal(ours(x), module(x))  # what it observed, for all
    module.apply(quantization.disable_fake_quant)
    assert torch.equal(ours(x), module(x))
    module.apply(quantization.enable_fake_quant)
    assert torch.equal(ours(x), module(x))


@pytest.mark.filterwarnings("ignore")
def test_converted_modules_run_in_evaluation(wrap):
    module = prepared()
    x = integers(7, 3, dtype=torch.float32)
    module(x)
    converted = quantization.convert(module.eval())
    assert torch.equal(wrap(converted)(x), converted(x))
