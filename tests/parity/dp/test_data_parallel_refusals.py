"""Forbidden uses of replicas, by a forward or a caller, raise one clear error."""

import copy

import pytest
import torch
from programs import X, buffer, module, parameter
from replicas import (
    F64,
    ON_EACH,
    ON_GPUS,
    Twin,
    assert_same_grads,
    bare,
    here,
    integer_weights,
    integers,
    linear,
    loss_of_all,
    net,
    step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


def grows(m, x):
    if len(m.layers) < 2:
        m.layers.append(linear())
    return m.layers[1](m.layers[0](x))


def adds(m, x):
    m.shift = nn.Parameter(torch.ones(3, **F64))
    return m.layer(x) + m.shift


def replaces_a_part(m, x):
    m.layer = linear()
    return m.layer(x)


def hooks(m, x):
    m.layer.weight.register_hook(lambda grad: grad * 2)
    return m.layer(x)


def freezes(m, x):
    made = m.layer(x)
    m.judge.requires_grad_(False)
    judged = m.judge(made)
    m.judge.requires_grad_(True)
    return judged, m.judge(made.detach())


def outgrows(m, x):
    m.size.resize_(20).fill_(5)
    return m.layer(x) * m.after + m.size[1]


def outgrows_for_a_while(m, x):
    m.size.resize_(20).fill_(5)
    m.size.resize_(1)
    return m.layer(x) * m.after


def is_written_to_by_out(m, x):
    torch.arange(20, out=m.size)
    return m.layer(x) * m.after


def nests(m, x):
    rows = list(m.layer(x).detach())
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def leads_to_itself(made):
    made.call = lambda x: made.norm(x)


def hooked_by_a_lambda(made):
    made.n = 0
    made.layer.register_forward_hook(lambda *_: setattr(made, "n", made.n + 1))


LATE = {"size": buffer(torch.zeros(1, **F64)), "after": buffer(integers(3))}
FROZEN = {name: parameter(b.tensor, trained=False) for name, b in LATE.items()}

NORM = {"norm": nn.BatchNorm1d(3).double()}
OWN = {"layers": nn.ModuleList([linear()])}

# name: (forward, held, pattern of the error)
MUST_NOT = {
    "make a layer": (grows, OWN, "made the parameter 'weight' of Linear"),
    "make a parameter": (adds, {}, "made the parameter 'shift' of Made"),
    "make a part anew": (replaces_a_part, {}, "made the parameter 'weight'"),
    "hook a parameter": (hooks, {}, "a hook on"),
    "freeze a part": (freezes, {"judge": net()}, "change requires_grad flags"),
    "return a nested tensor": (nests, {}, r"is a nested tensor.*override gather"),
    "write to the module itself": (
        lambda m, x: m.layer(m.call(x)),
        {**NORM, "init": leads_to_itself},
        r"^replica 1 of .* wrote to 'norm\.\w+' \(of a BatchNorm1d\)",
    ),
    "set an attribute of it": (
        lambda m, x: m.layer(x),
        {"init": hooked_by_a_lambda},
        "an attribute of a Made",
    ),
}


@pytest.mark.parametrize("what", MUST_NOT)
def test_what_a_forward_must_not_do_is_one_clear_error(wrap, what):
    forward, held, words = MUST_NOT[what]
    made = module(forward, **{"layer": linear(), **held})
    ours = wrap(made)
    with pytest.raises((RuntimeError, ValueError), match=words):
        ours(X)
    made.code = lambda m, x: m.layer(x)
    made.layer._forward_hooks.clear()
    (made.layer.weight._backward_hooks or {}).clear()
    assert torch.equal(ours(X), made.layer(X))


@ON_GPUS
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("held", [LATE, FROZEN], ids=["buffer", "frozen"])
@pytest.mark.parametrize(
    "forward", [outgrows, outgrows_for_a_while, is_written_to_by_out]
)
def test_a_copy_must_not_outgrow_its_place_on_a_gpu(wrap, forward, held):
    ours = wrap(module(forward, layer=linear(), **held))
    with pytest.raises(RuntimeError, match=r"replica 1 (?s:.*) not resizable"):
        ours(X)


def all_replicas(x):
    return True


def the_first_replica(x):
    return torch.equal(x[0].cpu(), X[0])


def the_last_replica(x):
    return torch.equal(x[-1].cpu(), X[-1])


def run_plainly(part, x):
    return part(x)


def run_by_a_checkpoint(part, x):
    return checkpoint(part, x.clone().requires_grad_(), use_reentrant=True)


@ON_EACH
@pytest.mark.parametrize(
    ("which", "run"),
    [
        (all_replicas, run_plainly),
        (the_first_replica, run_plainly),
        (the_last_replica, run_plainly),
        (all_replicas, run_by_a_checkpoint),  # its gradient arrives out of the graph
    ],
)
def test_no_gradient_may_arrive_for_a_parameter_that_a_forward_has_replaced(
    wrap, which, run
):
    def replaces(m, x):
        if m.replaces and which(x):
            m.layer.weight = nn.Parameter(m.layer.weight.detach() * 2)
        return {"out": run(m.layer, x), "apart": x * m.scale}

    scale = parameter(torch.ones(3, **F64))
    ours = wrap(module(replaces, layer=linear(), scale=scale, replaces=True))
    out = ours(X)
    out["apart"].sum().backward()  # not its gradient
    with pytest.raises(
        RuntimeError, match="a gradient has arrived for the parameter 'weight'"
    ):
        out["out"].sum().backward()
    with torch.no_grad():
        ours(X)
    ours.module.replaces = False
    ours.zero_grad()
    plain = copy.deepcopy(ours.module)
    for model in (plain, ours):  # the new parameter is trained from now on
        loss_of_all(model(here(model, X))).backward()
    assert_same_grads(ours, plain)


def test_a_layer_that_a_forward_has_made_is_trained_from_then_on(wrap):
    ours = wrap(module(grows, **OWN))
    with pytest.raises(RuntimeError, match=r"has made the parameter .* bare module"):
        ours(X)
    twin = Twin(lambda inner, n: ours, bare(ours))
    twin.inner = bare(ours)
    twin.step(step, X)


@ON_GPUS
def test_a_buffer_that_only_replicas_let_grow_does_no_lasting_harm(wrap):
    def grows_late(m, x):
        return m.layer(x) * m.after if x[0, 0] == 0 else outgrows(m, x)

    twin = Twin(wrap, module(grows_late, layer=linear(), **LATE))
    x = torch.zeros(6, 3, **F64)
    twin.step(step, x)
    late = x.clone()
    late[3:] = 1
    with pytest.raises(RuntimeError, match="not resizable"):
        twin.ours(late)
    twin.zero()
    twin.step(step, x)


# name: (arguments, error, pattern of the message)


def test_a_lazy_module_works_once_it_is_initialized(wrap):
    twin = Twin(wrap, nn.Sequential(nn.LazyLinear(2), nn.ReLU()).double())
    with pytest.raises(ValueError, match="uninitialized parameter"):
        twin.ours(X)
    for made in (twin.plain, twin.inner):  # as the message advises
        made(X)
        integer_weights(made)
    twin.step(step, X)


@ON_EACH
def test_gradients_that_a_forward_turns_on_itself_are_refused_to_autograd_grad(wrap):
    """Replicas' parameters are leaves then: a part of the gradient would be missing."""

    def turns_on(m, x):
        with torch.enable_grad():
            return m.layer(x)

    twin, wanted = Twin(wrap, module(turns_on, layer=linear())), []
    for model in twin.models:
        with torch.no_grad():
            out = model(X)
        wanted.append((out.sum(), list(bare(model).parameters())))
    (loss, parameters) = wanted[1]
    for ask in (
        lambda: torch.autograd.grad(loss, parameters, retain_graph=True),
        lambda: loss.backward(inputs=parameters, retain_graph=True),
    ):
        with pytest.raises(RuntimeError, match=r"only backward\(\) without inputs="):
            ask()
    for loss, _ in wanted:
        loss.backward()
    twin.assert_same()
