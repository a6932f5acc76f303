"""Gradients in contexts of torch.distributed.autograd equal those of torch's class.

../upstream/test_torch_suite_rpc.py runs torch's own tests, which cover sparse gradients
and models with remote parts.
"""

import copy
import tempfile
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from cases import (
    Branches,
    assert_equal,
    bits,
    compare_with_torch,
    grads_of,
    integer_weights,
    net,
    on_ranks,
)
from paceline._compat import torch_core
from support.threads import in_threads
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


@contextmanager
def workers(ranks):
    """Make the ranks RPC workers, over the loopback."""
    path = ranks.all(tempfile.mktemp())  # a name: rpc makes the file
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{path[0]}", _transports=["uv"]
    )
    rpc.init_rpc(
        f"rank{ranks.rank}",
        rank=ranks.rank,
        world_size=ranks.n,
        rpc_backend_options=options,
    )
    is_well = False
    try:
        yield
        is_well = True
    finally:
        rpc.shutdown(graceful=is_well)


kept = []  # torch's wrappers: torch may hang if one is dropped soon after a backward


def keeping(ranks):
    """Keep all wrappers of torch's class alive; return the ranks."""
    wrap = ranks.wrap_by_torch

    def wrap_and_keep(module, **options):
        kept.append(wrap(module, **options))
        return kept[-1]

    ranks.wrap_by_torch = wrap_and_keep
    return ranks


def backward(context, loss, **options):
    """Run backward in a context; return its gradients."""
    autograd.backward(context, [loss], **options)
    return autograd.get_gradients(context)


def of(model, gradients):
    """Return copies of a model's gradients in a context; None for a missing one."""
    found = [gradients.get(p) for p in model.parameters()]
    return [None if g is None else g.clone() for g in found]


def step(wrapper, x, **options):
    """Take one step in a new context; return its gradients."""
    with autograd.context() as context:
        return of(wrapper, backward(context, wrapper(x).sum(), **options))


@contextmanager
def line_of(ranks):
    """Make the ranks RPC workers; yield a wrapped layer and data for it."""
    with workers(ranks):
        yield ranks.wrap(integer_weights(nn.Linear(3, 2))), ranks.integers(2, 3)


def mean_of(ranks, x):
    """Return the mean gradient of the weight of a layer with two outputs."""
    return (sum(each.sum(0) for each in ranks.all(x)) / 2).expand(2, -1)


# ---- before RPC ---------------------------------------------------------------------


def test_a_forward_before_rpc_cannot_go_backward_in_a_context(ranks):
    model = ranks.wrap(net())
    out = model(ranks.integers(3, 6))
    with (
        workers(ranks),
        autograd.context() as context,
        pytest.raises(RuntimeError, match="ran in another context than"),
    ):
        backward(context, out.sum())


# ---- as with torch ------------------------------------------------------------------


class Hides(nn.Module):
    """Returns an object in which no library finds the tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return lambda: self.layer(x)


def steps_apart(ranks, wrap, hook=None, **options):
    model = wrap(net(), **options)
    if hook:
        model.register_comm_hook(ranks.group, hook)
    for k in range(4):
        yield step(model, ranks.integers(3, 6, key=k))
    assert set(grads_of(model)) == {None}


def steps_outside_between(ranks, wrap):
    model = wrap(net())
    for k in range(3):
        x = ranks.integers(3, 6, key=k)
        yield step(model, x)
        model(x).sum().backward()
        yield grads_of(model)


def backwards_that_add_up(ranks, wrap):
    model = wrap(net())
    with autograd.context() as context:
        for k in range(3):
            found = backward(context, model(ranks.integers(3, 6, key=k)).sum())
        yield of(model, found)


def local_before_the_average(ranks, wrap):
    model = wrap(net())
    with autograd.context() as context:
        with model.no_sync():
            loss = model(ranks.integers(3, 6, key=1)).sum()
            mine = of(model, backward(context, loss))
        assert ranks.all([bits(g) for g in mine]) != [[bits(g) for g in mine]] * 2
        yield of(model, backward(context, model(ranks.integers(3, 6)).sum()))


def hidden_outputs(ranks, wrap):
    model = wrap(integer_weights(Hides()))
    for k in range(3):
        with autograd.context() as context:
            hidden = model(ranks.integers(2, 6, key=k))
            yield of(model, backward(context, hidden().sum()))


def two_wrappers_in_one_backward(ranks, wrap):
    first = wrap(integer_weights(nn.Linear(3, 4)))
    second = wrap(integer_weights(nn.Linear(4, 2)))
    for k in range(3):
        with autograd.context() as context:
            loss = second(first(ranks.integers(2, 3, key=k))).sum()
            gradients = backward(context, loss)
            yield of(first, gradients) + of(second, gradients)


def forward_before_rpc(ranks, wrap):
    model = wrap(net())
    loss = model(ranks.integers(3, 6)).sum()
    with workers(ranks):
        loss.backward()
    yield grads_of(model)


def after_rpc(ranks, wrap):
    model = wrap(net())
    with workers(ranks):
        yield step(model, ranks.integers(3, 6))
    model(ranks.integers(3, 6, key=1)).sum().backward()
    yield grads_of(model)


RUNS = {
    "a forward before": forward_before_rpc,
    "a step after": after_rpc,
    "steps": steps_apart,
    "steps of small buckets": partial(steps_apart, bucket_cap_mb=0.001),
    "steps outside between": steps_outside_between,
    "backwards that add up": backwards_that_add_up,
    "local before the average": local_before_the_average,
    "hidden outputs": hidden_outputs,
    "two wrappers in one backward": two_wrappers_in_one_backward,
    "a communication hook": partial(steps_apart, hook=default_hooks.allreduce_hook),
}


@on_ranks(what=[*RUNS])
def test_gradients_in_contexts_are_those_of_torch(ranks, what):
    is_around = RUNS[what] not in (forward_before_rpc, after_rpc)
    with workers(ranks) if is_around else nullcontext():
        compare_with_torch(keeping(ranks), RUNS[what])


# ---- local gradients ----------------------------------------------------------------


def test_a_backward_in_a_context_of_a_forward_outside_is_refused(ranks):
    with line_of(ranks) as (wrapper, x):
        loss = wrapper(x).sum()
        with (
            autograd.context() as context,
            pytest.raises(RuntimeError, match="run both in one"),
        ):
            backward(context, loss)
        assert_equal(step(wrapper, x)[0], mean_of(ranks, x), "the next gradient")


def test_a_backward_in_another_context_than_its_forwards_is_refused(ranks):
    with workers(ranks):
        wrapper = ranks.wrap(nn.Linear(3, 2))
        with autograd.context() as context:
            backward(context, wrapper(torch.ones(1, 3)).sum())
            loss = wrapper(torch.ones(1, 3)).sum()

            def elsewhere(_):
                with autograd.context() as other:
                    backward(other, loss)

            with pytest.raises(RuntimeError, match="run both in one"):
                in_threads(elsewhere, 1)


def test_a_plain_backward_in_a_context_is_averaged_in_grad(ranks):
    with line_of(ranks) as (wrapper, x):
        with autograd.context() as context:
            wrapper(x).sum().backward()
            assert autograd.get_gradients(context) == {}
        assert_equal(wrapper.module.weight.grad, mean_of(ranks, x), "the gradient")


def test_local_gradients_outside_wait_for_the_next_average_outside(ranks):
    model = integer_weights(Branches())
    x, y = ranks.integers(3, 2), ranks.integers(3, 2, key=1)
    plain = copy.deepcopy(model)
    (plain(x).sum() + plain(y, both=False).sum()).backward()
    with workers(ranks):
        wrapper = ranks.wrap(model)
        with wrapper.no_sync():
            wrapper(x).sum().backward()
        step(wrapper, y)
        wrapper(y, both=False).sum().backward()
    for mine, local in zip(grads_of(wrapper), grads_of(plain), strict=True):
        assert_equal(mine, sum(ranks.all(local)) / 2, "the gradient")


def test_the_bare_model_is_trained_for_itself(ranks):
    with line_of(ranks) as (wrapper, x):
        step(wrapper, x)
        mine = step(wrapper.module, x)[0]
        assert_equal(mine, x.sum(0).expand(2, 3), "the gradient")


def test_a_model_that_has_changed_is_averaged_in_contexts_again(ranks):
    with line_of(ranks) as (wrapper, x):
        wrapper.module.weight.requires_grad_(False)
        assert step(wrapper, x)[0] is None
        wrapper.module.weight.requires_grad_(True)
        assert_equal(step(wrapper, x)[0], mean_of(ranks, x), "the gradient")
        wrapper.double()
        mine = step(wrapper, x.double())[0]
        assert_equal(mine, mean_of(ranks, x).double(), "the gradient")


# ---- unused parameters and failures -------------------------------------------------


def test_what_no_rank_uses_has_no_gradient_in_the_context(ranks):
    with workers(ranks):
        wrapper = ranks.wrap(integer_weights(Branches()))
        x = ranks.integers(3, 2)
        with autograd.context() as context:
            mine = of(wrapper, backward(context, wrapper(x, both=False).sum()))
        assert mine[2:] == [None, None]
        assert_equal(mine[0], mean_of(ranks, x), "the gradient")


@on_ranks(is_torch=[False, True])
def test_what_one_rank_leaves_out_is_refused_there_as_by_torch(ranks, is_torch):
    wrap = keeping(ranks).wrap_by_torch if is_torch else ranks.wrap
    words = "should exist in dist_autograd context" if is_torch else "left out"
    with workers(ranks):
        wrapper = wrap(integer_weights(Branches()), find_unused_parameters=True)
        with autograd.context() as context:
            loss = wrapper(ranks.integers(3, 2), both=ranks.rank == 0).sum()
            if ranks.rank == 1:
                with pytest.raises(RuntimeError, match=words):
                    autograd.backward(context, [loss])
            elif not is_torch:
                autograd.backward(context, [loss])


@on_ranks(is_held=[False, True])
def test_a_backward_that_fails_on_one_rank_fails_on_all(ranks, is_held):
    held, queue = [], torch_core._queue_callback

    def hold(callback):
        """Keep the callback of the backward's end alive, as a thread of torch may."""
        held.append(callback if is_held else None)
        queue(callback)

    def fail(_):
        raise ValueError("on purpose")

    with line_of(ranks) as (wrapper, x):
        step(wrapper, x)
        with (
            autograd.context() as context,
            mock.patch.object(torch_core, "_queue_callback", hold),
        ):
            output = wrapper(x)
            if ranks.rank == 0:
                output.register_hook(fail)
                threading.Timer(0.2, held.clear).start()
            words = (
                "python_error" if ranks.rank == 0 else r"the step of rank 0.* failed"
            )
            with pytest.raises(RuntimeError, match=words):  # torch's error on rank 0
                autograd.backward(context, [output.sum()])
        assert_equal(step(wrapper, x)[0], mean_of(ranks, x), "the next gradient")


# ---- cost without RPC ---------------------------------------------------------------


def test_without_rpc_nothing_is_loaded_and_no_node_has_a_hook(ranks):
    wrapper = ranks.wrap(nn.Linear(3, 2))
    wrapper(torch.ones(1, 3)).sum().backward()
    assert wrapper._session.reducer.contexts is None
