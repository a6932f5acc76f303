"""Accumulation, unused parameters, and gradients that a program keeps."""

import contextlib
import gc
import time
import warnings

import pytest
import torch
from cases import (
    Terms,
    Twin,
    as_torch,
    assert_equal,
    bits,
    factors,
    grads_of,
    net,
    on_gpus_too,
    on_ranks,
    step_of,
)
from paceline import MismatchError, PeerError
from support.processes import shared_mappings
from support.threads import in_threads

LARGE, SMALL = (120, 100), (7,)  # gradients of LARGE become views, of SMALL do not
SHAPES = [LARGE, SMALL] * 3


def loss(ranks, key, used=None):
    return lambda model: model(factors(ranks, model, key, used))


# ---- no_sync ------------------------------------------------------------------------


def test_a_whole_step_without_synchronisation_waits_for_nobody(ranks):
    model = ranks.wrap(Terms(SHAPES))
    with model.no_sync():
        for step in range(ranks.rank + 1):  # the number may differ between ranks
            loss(ranks, step)(model).backward()
    loss(ranks, "last")(model).backward()
    ranks.assert_same([p.grad for p in model.parameters()], "the average")


@as_torch(strict=[False, True], how=["plain", "compiled", "nested"])
def test_no_sync_that_is_not_enabled_does_nothing(ranks, wrap, strict, how):
    is_ours = wrap == ranks.wrap
    model = wrap(net(), **({"strict": strict} if is_ours else {}))

    def no_sync(enabled):
        if is_ours:
            return model.no_sync(enabled=enabled)
        return model.no_sync() if enabled else contextlib.nullcontext()

    def accumulate(x, is_last):
        with no_sync(not is_last), no_sync(not is_last and how != "nested"):
            model(x).sum().backward()

    if how == "compiled":
        torch._dynamo.reset()
        accumulate = torch.compile(accumulate, backend="eager")
    for step in range(3):
        model.zero_grad()
        for micro in range(3):
            accumulate(ranks.integers(3, 6, key=(step, micro)), micro == 2)
            yield [*grads_of(model), model.require_backward_grad_sync]


def test_what_was_accumulated_and_reset_neither_is_averaged_nor_counts_as_used(ranks):
    """If its gradient were zeros instead of None, an optimizer would decay a weight."""
    twin = Twin(ranks, Terms(SHAPES))
    for used in (None, {4, 5}):
        twin.local(loss(ranks, 0))
        twin.zero()
        twin.step(loss(ranks, 1, used))
        twin.zero()


# ---- unused parameters --------------------------------------------------------------


@on_gpus_too()
def test_a_gradient_that_nobody_used_is_the_same_object_with_the_same_values(ranks):
    model = ranks.wrap(Terms(SHAPES))
    for step in range(2):
        loss(ranks, step)(model).backward()
    before = [(p.grad, p.grad.clone(), p.grad.data_ptr()) for p in model.parameters()]
    for step in range(3):
        loss(ranks, step, {0, 1})(model).backward()
    pairs = list(zip(model.parameters(), before, strict=True))
    for p, (grad, values, pointer) in pairs[2:]:
        assert p.grad is grad
        assert p.grad.data_ptr() == pointer
        assert_equal(p.grad, values, "an unused gradient")


# ---- gradients that a program keeps -------------------------------------------------

NEXT = {
    "unused here": lambda rank: {0, 1} if rank == 1 else None,
    "unused there": lambda rank: {0, 1} if rank == 0 else None,
    "unused everywhere": lambda rank: {0, 1},
    "used everywhere": lambda rank: None,
}


@on_ranks(use=[*NEXT], then=["plain", "recorded", "watched", "turned", "own", "late"])
def test_parts_of_kept_gradients_survive_whatever_the_next_backward_is(
    ranks, use, then
):
    """The loops of test_differential_programs.py keep gradients as they are."""
    model = ranks.wrap(Terms(SHAPES))
    for step in range(2):
        loss(ranks, step)(model).backward()
    large, other = model.module.terms[2].grad, model.module.terms[4].grad
    kept = [large.flatten()[1:], torch.from_numpy(other.numpy())]
    del large, other
    values = [tensor.clone() for tensor in kept]
    model.zero_grad()
    rows = factors(ranks, model, "next", NEXT[use](ranks.rank))
    if then == "watched":
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)
    if then == "own":
        for p in model.parameters():
            p.grad = torch.full_like(p, 3.0)
    if then == "turned":
        rows = [f if f is None or f.dim() < 2 else turned(f) for f in rows]
    total = model(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        total.backward(create_graph=then == "recorded")
    for i, (tensor, old) in enumerate(zip(kept, values, strict=True)):
        assert_equal(tensor, old, f"kept gradient {i}")
    for p in model.parameters():
        p.grad = None  # create_graph made a cycle


def turned(tensor):
    """Return the same values in the opposite memory order."""
    return tensor.t().contiguous().t()


@on_gpus_too()
def test_swapped_gradients_are_told_apart(ranks):
    """Two parameters of one shape exchange their gradients between backwards."""
    twin = Twin(ranks, Terms(SHAPES[:4]))
    for step in range(4):
        twin.step(loss(ranks, step))
        for model in (twin.plain, twin.ours):
            a, _, b, _ = model.parameters()
            a.grad, b.grad = b.grad, a.grad


@on_gpus_too()
def test_gradients_live_on_after_the_wrapper_and_then_free_its_memory(ranks):
    gc.collect()
    before = shared_mappings()
    model = ranks.wrap(Terms(SHAPES))
    loss(ranks, 0)(model).backward()
    bare, grads = model.module, [bits(p.grad) for p in model.parameters()]
    del model
    gc.collect()
    assert [bits(p.grad) for p in bare.parameters()] == grads
    loss(ranks, 1)(bare).backward()  # accumulates locally
    bare.zero_grad()
    gc.collect()
    assert set(shared_mappings()) <= set(before)


@on_gpus_too()
@on_ranks(first_goes=["before", "after"])
def test_a_module_may_be_wrapped_again(ranks, first_goes):
    twin = Twin(ranks, Terms(SHAPES))
    twin.step(loss(ranks, 0))
    bare = twin.ours.module
    if first_goes == "before":
        twin.ours = None
    twin.ours = ranks.wrap(bare)
    gc.collect()
    twin.step(loss(ranks, 1))
    twin.zero()
    twin.step(loss(ranks, 2))
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in bare.parameters())


# ---- several forwards and backwards -------------------------------------------------


def of_a_retained_graph(model, x, y):
    total = model(x).sum()
    return [total, total, total]


def of_two_columns(model, x, y):
    out = model(x)
    return [out[:, 0].sum(), out[:, 1].sum()]


SEVERAL = {
    "two forwards": lambda model, x, y: [model(x).sum(), model(y).sum()],
    "two losses of one output": of_two_columns,
    "a retained graph": of_a_retained_graph,
    "towards some inputs": lambda model, x, y: [model(x).sum()],
}


@on_gpus_too()
@on_ranks(losses=[*SEVERAL])
def test_several_backwards_follow_the_forwards(ranks, losses):
    twin = Twin(ranks, net())
    x, y = ranks.integers(3, 6, key="a"), ranks.integers(2, 6, key="b")
    for step in range(3):
        twin.zero(set_to_none=step != 1)
        for model in (twin.plain, twin.ours):
            options = {"retain_graph": losses != "two forwards"}
            if losses == "towards some inputs":
                options["inputs"] = [*model.parameters()][:2]
            for one in SEVERAL[losses](model, x, y):
                one.backward(**options)
                if model is twin.plain:
                    twin.average()
        twin.check()


@on_ranks(checks=["each alone", "both"])
def test_two_backwards_in_opposite_order_on_two_ranks_are_an_error_at_once(
    ranks, checks
):
    """Each rank waits for what the other would send only after its own wait."""
    models = [ranks.wrap(net()), ranks.wrap(net())]
    for model in models if checks == "both" else []:
        model(ranks.integers(3, 6)).sum().backward()
    losses = [model(ranks.integers(3, 6)).sum() for model in models]
    if ranks.rank == 1:
        losses.reverse()

    def run():
        for loss in losses:
            loss.backward()

    with pytest.raises(MismatchError, match="wait for one another"):
        run()
    ranks.all(None)  # else a rank may only see that its peer has left


def test_two_threads_may_run_two_wrappers_in_any_order(ranks):
    models = [ranks.wrap(net()), ranks.wrap(net())]

    def run(which):
        if which != ranks.rank:
            time.sleep(1.5)  # longer than ranks wait before they check each other
        for _ in range(3):
            models[which](ranks.integers(3, 6)).sum().backward()

    in_threads(run, 2)
    for model in models:
        ranks.assert_same([p.grad for p in model.parameters()], "gradients")


def test_a_slow_rank_is_waited_for_after_another_wrapper_failed(ranks):
    """It must not count as waiting there: what it waited for has failed."""
    slow, failing = ranks.wrap(net()), ranks.wrap(net())
    for model in (slow, failing):
        model(ranks.integers(3, 6)).sum().backward()
    out = failing(ranks.integers(3, 6))
    ranks.all(0)  # a later forward would already raise the failure
    if ranks.rank == 0:
        out.register_hook(_explode)
    with pytest.raises((ZeroDivisionError, PeerError)):
        out.sum().backward()
    if ranks.rank == 1:
        time.sleep(1.5)
    for model in (slow, failing):
        step_of(model, ranks.integers(3, 6))
        ranks.assert_same([p.grad for p in model.parameters()], "gradients")


def _explode(_):
    raise ZeroDivisionError
