"""Hooks of every kind, checkpoints, functions with their own backward."""

from types import MethodType

import pytest
import torch
from replicas import (
    accumulate,
    bare,
    beside,
    grads_of,
    integers,
    linear,
    loss_of,
    net,
    smooth_net,
    step,
)
from torch import nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from programs import GPUS, THREE, X, grown, module, pairs, program, steps, trains, uses

# ---- modules ------------------------------------------------------------------------


@uses(net)
def hooks_of_the_wrapper_see_the_whole_batch(model):
    seen = []

    def before(model, args, kwargs):
        seen.append(args[0].clone())
        return (args[0] * 2,), kwargs

    def after(model, args, kwargs, out):
        seen.append(out.detach().clone())
        return out + 1

    def backward_before(model, grads):
        seen.append(grads[0].clone())
        return (grads[0] * 3,)

    def backward(model, grads, of_outputs):
        seen.extend([grads[0].clone(), of_outputs[0].clone()])

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
    model.register_full_backward_pre_hook(backward_before)
    model.register_full_backward_hook(backward)
    for _ in range(2):
        step(model, grown()).backward()
    assert len(seen) == 10
    return seen


def hook_parts(m):
    m[0].register_forward_hook(lambda m, args, out: out * m.weight.sum())
    m[1].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,))
    m[2].register_forward_pre_hook(lambda m, args: (args[0] - m.bias.sum(),))


trains({"hooks_of_parts_may_change_values": net}, hook_parts)


def count(m, *_):
    m.n_calls += 1


def counted_by_a_method(m):
    m.layer.register_forward_hook(MethodType(count, m))


@program(steps(n=3), layer=linear(), n_calls=0, init=counted_by_a_method)
def attributes_that_a_bound_hook_sets_are_the_replicas(m, x):
    return m.layer(x) * (1 + m.n_calls)


@program(steps(n=3), layer=linear(), is_hooked=False)
def hooks_that_a_replica_registers_are_its_own(m, x):
    """As Hugging Face's models do in their first forward."""
    seen = []
    if not m.is_hooked:
        m.layer.register_forward_hook(lambda m, a, out: m.seen.append(out))
        m.is_hooked = True
    m.layer.seen = seen
    out = m.layer(x)
    assert len(seen) == 1, "hooks of another replica ran too"
    return out


@uses(net)
def hooks_for_all_modules_may_come_after_the_first_call(model):
    outs = [model(X)]
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, _, out: out * 2 if isinstance(m, nn.ReLU) else None
    )
    try:
        outs.append(model(X))
    finally:
        handle.remove()
    return [*outs, model(X)]


# ---- parameters and tensors ---------------------------------------------------------

WITH_AN_IDLE_PART = module(lambda m, x: m.used(x), used=linear(), idle=net())
KINDS = {kind: kind for kind in ("hook", "post_accumulate_grad_hook", "node")}
TIMES = {when: when for when in ("before", "after a forward", "late")}


def hooked(p, kind, hook):
    """Register a hook that gets a gradient or the parameter; return its owner."""
    if kind != "node":
        getattr(p, f"register_{kind}")(hook)
        return p
    node = p.view_as(p).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: hook(grads[0]))
    return node


@uses(WITH_AN_IDLE_PART, pairs(KINDS, TIMES))
def hooks_of_parameters_fire_once_with_the_total(model, kind, when):
    fired, owners = [], []
    if when != "before":
        model(X).sum()  # a graph without hooks, thrown away
    if when == "late":
        step(model, X).backward()
        model.zero_grad()
    for name, p in bare(model).named_parameters():

        def hook(seen, name=name):
            is_p = kind == "post_accumulate_grad_hook"
            fired.append((name, (seen.grad if is_p else seen).clone()))

        owners.append(hooked(p, kind, hook))
    accumulate(model)
    assert len(fired) == 4
    return [dict(sorted(fired[:2])), dict(sorted(fired[2:]))]


IDLE = {f"{name}, {kind}": (i, kind) for kind in KINDS for i, name in enumerate("wb")}


@uses(WITH_AN_IDLE_PART, pairs(IDLE, {"before": 0, "late": 1}))
def a_hook_of_one_unused_parameter_is_not_called(model, which, is_late):
    (i, kind), called = which, []
    accumulate(model, is_late)
    owner = hooked([*bare(model).idle.parameters()][i], kind, called.append)
    accumulate(model)
    assert owner is not None
    assert not called


@uses(net)
def hooks_for_several_gradients_see_the_totals(model):
    seen = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda grads: seen.append([*map(torch.clone, grads)])
    )
    accumulate(model)
    handle.remove()
    assert len(seen) == 2
    return seen


@uses(net)
def an_optimizer_may_step_inside_backward(model):
    """As torch's recipe to save the memory of gradients does."""

    def take(p):
        torch.optim.SGD([p], lr=1.0).step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(take)
    accumulate(model, 3, low=-1, high=1)
    assert all(p.grad is None for p in model.parameters())


@uses(net)
def a_hook_may_call_the_wrapper(model, x):
    seen = []

    def call(_):
        seen.append(model(integers(5, 3, seed=3)))

    x.register_hook(call)
    bare(model)[0].weight.register_hook(call)
    for _ in range(2):
        step(model, x).backward()
    assert len(seen) == 4
    return seen


@program(layer=linear())
def a_forward_hooks_its_own_tensors(m, x):
    y = m.layer(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2)
    return y.square()


@uses(
    module(lambda m, x: (m.one(x), m.two(x)), one=net(), two=net(1)),
    {"first order": False, "recorded": True},
)
def hooks_get_a_tensor_where_the_loss_leaves_out_an_output(model, create_graph):
    doubled_gradients(bare(model))
    some = list(bare(model).one.parameters())
    grads = torch.autograd.grad(loss_of(model(X)[0]), some, create_graph=create_graph)
    loss_of(model(X)[0]).backward()
    others = list(bare(model).two.parameters())
    assert not any(p.grad is not None and p.grad.any() for p in others)
    bare(model).two.zero_grad()
    return grads


def doubled_gradients(m):
    for p in m.parameters():
        p.register_hook(lambda grad: grad * 2)


@program(a=linear(), b=linear(2), init=doubled_gradients)
def hooks_see_parameters_that_a_reentrant_checkpoint_hides(m, x):
    return checkpoint(m.b, m.a(x), use_reentrant=True)


@uses(WITH_AN_IDLE_PART, on=GPUS)
def hooks_set_after_the_forward_get_zeros_for_unused_parameters(model):
    """As in torch; the plain module does not call them."""
    output, idle, called = model(X), bare(model).idle[0], []
    idle.weight.register_hook(called.append)
    idle.bias.register_post_accumulate_grad_hook(lambda p: called.append(p.grad))
    output.sum().backward()
    if model is not bare(model):
        assert [grad.shape for grad in called] == [(4, 3), (4,)]
        assert not any(grad.any() for grad in called)
        idle.zero_grad()


# ---- checkpoints, and custom functions -----------------------------------------------

BOTH = {"saved tensors": False, "reentrant": True}


@program(
    cases={label: {"again": again} for label, again in BOTH.items()},
    first=net(1),
    last=linear(2, 2),
)
def checkpoints_inside_the_module_work(m, x):
    out = m.last(checkpoint(m.first, x, use_reentrant=m.again))
    return checkpoint(m.last, out, use_reentrant=m.again)


@uses(net, BOTH)
def checkpoints_around_may_be_nested_and_asked_twice(model, x, use_reentrant):
    def inner(x):
        return checkpoint(model, x, use_reentrant=use_reentrant) * 2

    for _ in range(2):
        loss = loss_of(checkpoint(inner, x, use_reentrant=use_reentrant))
        if not use_reentrant:
            loss.backward(retain_graph=True)
        loss.backward()


@uses(net, BOTH, on=THREE)
def a_wrapper_may_be_checkpointed_by_itself_and_inside_another(model, x, use_reentrant):
    def again(function, x):
        return checkpoint(function, x, use_reentrant=use_reentrant)

    inner, holder = beside(model, net(1)), module(lambda m, x: again(m.inner, x))
    sizes, holder.inner = [], inner
    bare(inner)[0].register_forward_pre_hook(lambda m, args: sizes.append(len(args[0])))
    outer = beside(model, holder)
    calls = [
        lambda x: again(inner, x),
        outer,
        lambda x: outer(again(model, x)[:, [0, 1, 1]]),
    ]
    for made in (calls[:1], calls[1:2], calls):
        torch.no_grad()(inner)(X)  # as an evaluation does
        torch.no_grad()(outer)(X)
        sizes.clear()
        loss = sum(loss_of(call(x)) for call in made)
        in_forward = sorted(sizes)
        loss.backward()
        assert sorted(sizes) == sorted(2 * in_forward)
    return grads_of(outer)


def two_outputs(m, x):
    out = m.net(x)
    return {"first": out.sigmoid(), "last": [m.last(out).t().contiguous().t()]}


@uses(
    module(two_outputs, net=smooth_net(), last=linear(3, 2)),
    pairs({"0": 0, "1": 1}, {"late": False, "early": True}),
    on=GPUS,
    exact=False,
)
def a_checkpoint_round_the_wrapper_with_several_outputs(model, place, is_early):
    if model is not bare(model):
        model = type(model)(bare(model), model.device_ids, output_device=place)
    seen = []
    with checkpoints.set_checkpoint_early_stop(is_early):
        for n_rows in (7, 1, 5, 7):
            model.zero_grad()
            x = grown(integers(n_rows, 3))
            for _ in range(2):  # gradients add up
                out = checkpoint(model, x, use_reentrant=False)
                loss = loss_of(out["first"]) + out["last"][0].exp().sum()
                loss.backward(retain_graph=True)
                loss.backward()
            seen += [x.grad, *grads_of(model)]
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad.sign() / 8)
    return seen


@uses(smooth_net, exact=False)
def a_checkpoint_may_keep_some_results(model):
    make_contexts = getattr(checkpoints, "create_selective_checkpoint_contexts", None)
    if make_contexts is None:
        pytest.skip("this torch has no selective checkpoints")
    kept = [torch.ops.aten.addmm.default, torch.ops.aten.tanh.default]
    for _ in range(2):
        out = checkpoint(
            model, X, use_reentrant=False, context_fn=lambda: make_contexts(kept)
        )
        loss_of(out).backward()


def in_the_middle(model):
    x = integers(6, 3)
    x[::2, 0] = torch.tensor([-1, -1, 1], dtype=x.dtype)
    for _ in range(1000):
        torch.ones(1, requires_grad=True) * 1  # the caller's nodes come first
    for _ in range(2):
        loss_of(model(grown(x))).backward()


@program(in_the_middle, inner=linear(), outer=linear(), in_parts=True)
def a_reentrant_checkpoint_runs_in_the_middle_of_a_backward(m, x):
    """Before or after a layer without a checkpoint."""
    options = {"use_reentrant": True, "preserve_rng_state": False}
    if x.detach()[0, 0] > 0:
        return checkpoint(m.inner, m.outer(x), **options)
    for _ in range(5):  # the checkpoint's backward runs before another replica's
        x = x * 1
    return m.outer(checkpoint(m.inner, x, **options))


class Cube(torch.autograd.Function):
    """Saves its input; its gradient deliberately differs from the formula."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return ctx.factor * 3 * x**2 * grad + 1, None


@program(steps(x=lambda seed: (integers(7, 3, seed=seed), 2 + seed)), linear=linear())
def functions_of_ones_own_run_in_every_replica(m, x, factor):
    return Cube.apply(m.linear(x), factor)
