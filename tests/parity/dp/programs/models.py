"""Models of common kinds, modules made by other tools, and odd ones."""

import torch
import torch._dynamo  # at collection: the garbage collector leaves it out from then on
from replicas import (
    Parent,
    accumulate,
    bare,
    beside,
    grow,
    integers,
    linear,
    loss_of,
    net,
    reals,
    smooth_net,
    step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from programs import Made, X, trains, uses


def holder(inner, again=None):
    return Parent(nn.Sequential(linear(), inner, *([inner] if again else [])))


def exported():
    shapes = ({0: torch.export.Dim("rows")},)
    return torch.export.export(net(), (X,), dynamic_shapes=shapes).module()


def compiled_in_place():
    made = Parent(linear())
    made.compile(backend="eager")
    made.inner.compile(backend="eager")
    return made


trains(
    {
        "a script": lambda: torch.jit.script(net()),
        "a script inside": lambda: holder(torch.jit.script(linear())),
        "a shared script": lambda: holder(torch.jit.script(linear()), True),
        "a trace": lambda: torch.jit.trace(net(), X),
        "a trace inside": lambda: holder(torch.jit.trace(linear(), X)),
        "compiled": lambda: torch.compile(net(), backend="eager"),
        "compiled inside": lambda: holder(torch.compile(linear(), backend="eager")),
        "compiled in place": compiled_in_place,
        "a graph": lambda: torch.fx.symbolic_trace(holder(linear())),
        "exported": exported,
    },
    needs_grad=False,
    evaluates=False,
    n=3,
)


def compile_in_place(model):
    model.compile(backend="eager")
    return model


def compile_module_later(model):
    model(X)
    compile_in_place(bare(model))
    return model


COMPILES = {
    "round": lambda model: torch.compile(model, backend="eager"),
    "in place": compile_in_place,
    "the module later": compile_module_later,
    "with operations round it": lambda model: torch.compile(
        lambda x: model(x * 1) + 0, backend="eager"
    ),
}


@uses(net, COMPILES)
def a_compiled_wrapper_trains_as_the_plain_module(model, compiles):
    torch._dynamo.reset()
    accumulate(compiles(model))


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double()


def convolutions():
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU()
    return nn.Sequential(
        *layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).double()


MAKES = {
    "transformer": (transformer, (7, 5, 8)),
    "convolutions": (convolutions, (7, 2, 4, 4)),
}

for name, (make, shape) in MAKES.items():
    trains(
        {f"a_model[{name}]": make},
        nn.Module.eval,
        x=lambda seed, shape=shape: (reals(*shape, seed=seed),),
        descends=False,
        exact=False,
    )


@uses(linear, {"detached": True, "whole graph": False})
def a_wrapper_takes_what_it_has_returned(model, x, is_detached):
    """As a language model that passes its state on."""
    state = model(x)
    loss = loss_of(state)
    for _ in range(2):
        state = model(state.detach() if is_detached else state)
        loss = loss + loss_of(state)
    loss.backward()


@uses(smooth_net, exact=False)
def a_trace_of_the_wrapper_computes_what_it_is_given(model):
    model(reals(7, 3))
    traced = torch.jit.trace(model, reals(7, 3))
    before = traced(reals(9, 3, seed=5))
    grow(model)
    return before, traced(reals(9, 3, seed=5))


@uses(smooth_net, {"saved": False, "again": True}, exact=False)
def a_checkpoint_round_a_wrapper_in_a_wrapper(model, use_reentrant):
    """The inner wrapper calls its module plainly: it runs whole, once and again."""
    n_rows = []
    bare(model).register_forward_pre_hook(lambda m, args: n_rows.append(len(args[0])))

    def forward(m, x):
        return checkpoint(m.inner, m.layer(x), use_reentrant=use_reentrant)

    outer = beside(model, Made(forward, {"layer": linear(), "inner": model}))
    n = len(getattr(model, "device_ids", "1"))
    step(outer, integers(6, 3)).backward()
    assert n_rows == [6 // n] * 2 * n
