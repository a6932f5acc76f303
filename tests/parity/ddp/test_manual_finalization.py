"""`finalize_backward()` ends a step: torch 2.15's members, with any torch."""

import copy

import pytest
import torch
import torch.distributed as dist
from cases import (
    Branches,
    assert_equal,
    assert_same_grads,
    grads_of,
    net,
    on_gpus_too,
    on_ranks,
    skip_without_argument,
)
from surface_cases import Counting, X
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

NOT_REQUIRED = (
    "finalize_backward() called but manual backward finalization is not required. Set "
    "require_manual_backward_finalization to true first."
)
NOTHING = (
    "finalize_backward() called but no gradient reduction requires finalization. This "
    "can happen if no_sync() is active or finalize_backward() was already called for "
    "this backward pass."
)
UNFINISHED = (
    "Expected to have finalized the prior backward pass before starting a new one. "
    "Call finalize_backward() after backward() when "
    "require_manual_backward_finalization is true."
)
EARLY = "finalize_backward() called before all DDP buckets were ready."
LATE = (
    "set_manual_finalization_required cannot be called after forward while a backward "
    "pass is expected or in progress."
)


def manual(model):
    model.require_manual_backward_finalization = True
    return model


def wrap_of(ranks, by):
    if by == "torch":
        skip_without_argument("lazy_bucket_allocation")
    return ranks.wrap if by == "ours" else ranks.wrap_by_torch


def words_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


# ---- gradients ----------------------------------------------------------------------


@on_gpus_too(where=["after", "in a hook"])
@on_ranks(2, 4, where=["after", "in a hook", "after, with a hook"])
def test_gradients_are_those_of_a_backward_that_ends_by_itself(ranks, where):
    """The first layer, outside of the wrapper, stands for sparse work behind it."""
    models = manual(ranks.wrap(net())), ranks.wrap_by_torch(net())
    if where == "after, with a hook":
        for model in models:
            model.register_comm_hook(ranks.group, default_hooks.allreduce_hook)
    for step in range(4):
        x = ranks.integers(3, 6, key=step)
        for model in models:
            model.zero_grad(set_to_none=step < 3)
            before = (x * 2).requires_grad_()
            given = before * 1
            out, in_hook = model(given), []

            def end(_, model=model, ended=in_hook):
                if not model.should_finalize_after_backward:
                    model.finalize_backward()
                    ended.extend(grads_of(model))

            if where == "in a hook" and model is models[0]:
                given.register_hook(end)
            out.sum().backward()
            if model is models[0] and not in_hook:
                local = model.module[4].bias.grad
                assert torch.equal(local, torch.full_like(local, 3.0))
                model.finalize_backward()
            assert bool(in_hook) == (
                where == "in a hook" and model is models[0] and step > 0
            )
            assert before.grad is not None
        assert_same_grads(*models, f"step {step}")
        for mine, p in zip(in_hook, models[1].parameters(), strict=False):
            assert_equal(mine, p.grad, "in the hook")


@on_ranks(group=["all ranks", "each rank alone"])
def test_gradients_dropped_before_the_end_come_back_averaged(ranks, group):
    if group == "each rank alone":
        ranks.group = ranks.alone()
    models = manual(ranks.wrap(net())), ranks.wrap_by_torch(net())
    for step in range(3):
        for model in models:
            model(ranks.integers(3, 6, key=step)).sum().backward()
        models[0].zero_grad()
        dist.all_reduce(torch.ones(1), group=ranks.group)  # a collective of the user
        models[0].finalize_backward()
        assert_same_grads(*models)
        models[1].zero_grad()
        models[0].zero_grad()


def test_gradients_accumulate_without_a_call_under_no_sync(ranks):
    models = manual(ranks.wrap(net())), ranks.wrap_by_torch(net())
    for step in range(4):
        for model in models:
            x = ranks.integers(3, 6, key=step)
            if step % 2 == 0:
                with model.no_sync():
                    model(x).sum().backward()
                continue
            model(x).sum().backward()
            if model is models[0]:
                with model.no_sync():  # says nothing of a step that is under way
                    model.finalize_backward()
        assert_same_grads(*models)


@on_ranks(option=["find_unused_parameters", "static_graph", None])
def test_unused_parameters_are_known_at_the_end_of_a_backward(ranks, option):
    model = ranks.wrap(Branches(), **({option: True} if option else {}))
    manual(model)
    for step in range(3):
        out = model(X * (1 + ranks.rank), both=False)
        is_late = step == 0 or option == "find_unused_parameters"
        assert model.should_finalize_after_backward is is_late
        out.sum().backward()
        model.finalize_backward()
        assert model.module.second.weight.grad is None
        ranks.assert_same([model.module.first.weight.grad], "a gradient")


def test_mixed_precision_and_buffers_go_through_the_same_end(ranks):
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [ranks.wrap(net(), mixed_precision=precision) for _ in range(2)]
    manual(models[0])
    for step in range(3):
        for model in models:
            model.zero_grad()
            model(ranks.integers(3, 6, key=step)).sum().backward()
        assert models[0].should_finalize_after_backward
        models[0].finalize_backward()
        assert_same_grads(*models)
    counting = manual(ranks.wrap(Counting(ranks.rank)))
    for _ in range(2):
        counting.module.seen.fill_(ranks.rank + 5)
        counting(X).sum().backward()
        counting.finalize_backward()
    with torch.no_grad():
        counting(X)
    assert counting.module.seen.item() == 5


def test_two_wrappers_of_one_backward_end_in_any_order(ranks):
    models = [manual(ranks.wrap(net())), manual(ranks.wrap(net()))]
    twin = ranks.wrap_by_torch(net())
    for step in range(3):
        x = ranks.integers(3, 6, key=step)
        for model in (*models, twin):
            model.zero_grad()
        sum(model(x).sum() for model in models).backward()
        twin(x).sum().backward()
        for model in models[:: 1 if step % 2 else -1]:
            model.finalize_backward()
        for model in models:
            assert_same_grads(model, twin)


# ---- errors -------------------------------------------------------------------------


def errors_of(model):
    """Do everything wrong; yield what that raises."""
    yield words_of(model.finalize_backward)
    manual(model)
    yield words_of(model.finalize_backward)
    model(X).sum()
    yield words_of(model.finalize_backward)
    loss = model(X).sum()
    loss.backward()
    for value in (False, True):
        yield words_of(
            lambda value=value: setattr(
                model, "require_manual_backward_finalization", value
            )
        )
    yield words_of(lambda: model(X))
    with model.no_sync():
        yield words_of(lambda: model(X))
    with torch.no_grad():
        yield words_of(lambda: model(X))
    yield words_of(model.finalize_backward)
    yield words_of(model.finalize_backward)
    with model.no_sync():
        model(X).sum().backward()
    yield words_of(model.finalize_backward)
    model.require_manual_backward_finalization = False
    model(X).sum().backward()
    yield words_of(model.finalize_backward)


ERRORS = [NOT_REQUIRED, NOTHING, NOTHING, LATE, None, UNFINISHED, UNFINISHED, None]
ERRORS += [None, NOTHING, NOTHING, NOT_REQUIRED]


@on_ranks(by=["ours", "torch"])
def test_errors_are_in_the_words_of_torch(ranks, by):
    wrap = wrap_of(ranks, by)
    heard = [*errors_of(wrap(Branches()))]
    assert len(heard) == len(ERRORS)
    for said, words in zip(heard, ERRORS, strict=True):
        assert said == words or (words == LATE and said.startswith(words))


@on_ranks(by=["ours", "torch"])
def test_a_call_before_all_gradients_are_there_fails_the_backward(ranks, by):
    model = manual(wrap_of(ranks, by)(net()))
    model(ranks.integers(3, 6)).sum().backward()
    model.finalize_backward()
    out = model(ranks.integers(3, 6))
    model.module[4].weight.register_hook(lambda _: model.finalize_backward())
    heard = words_of(out.sum().backward)
    assert heard is not None
    if not heard.startswith(EARLY):  # the other rank failed first
        assert by == "ours"
        assert EARLY in heard


def test_a_second_backward_waits_for_the_end_of_the_first(ranks):
    model, other = manual(ranks.wrap(net())), ranks.wrap_by_torch(net())
    x = ranks.integers(3, 6)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    assert words_of(loss.backward) == UNFINISHED
    assert words_of(model._check_reducer_finalized).startswith("Expected to have ")
    model.finalize_backward()
    other(x).sum().backward()
    assert_same_grads(model, other)


def test_a_second_backward_of_hidden_outputs_changes_no_average(ranks):
    class Hides(nn.Linear):
        def forward(self, x):
            self.loss = super().forward(x).sum()

    model = manual(ranks.wrap(Hides(2, 2)))
    model(X * (1 + 2 * ranks.rank))
    model.module.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="before finalize_backward"):
        model.module.loss.backward()
    model.finalize_backward()
    assert torch.equal(model.module.weight.grad, (X * 2).expand(2, 2))


def test_a_model_changed_before_the_end_is_refused(ranks):
    model = manual(ranks.wrap(Branches()))
    model(X).sum().backward()
    model.module.second.requires_grad_(False)
    assert words_of(lambda: model(X)) == UNFINISHED
    model.finalize_backward()
    ranks.assert_same([model.module.second.weight.grad], "a gradient")
    model(X).sum().backward()
    model.finalize_backward()


# ---- the two members of the constructor's object ------------------------------------


def test_a_copy_ends_its_steps_as_its_original_does(ranks):
    ranks.group = dist.group.WORLD
    model = manual(ranks.wrap(net(), lazy_bucket_allocation=True))
    other = copy.deepcopy(model)
    assert other.require_manual_backward_finalization
    assert other.lazy_bucket_allocation is True
    assert words_of(other.finalize_backward) == NOTHING
    for each in (model, other):
        each(ranks.integers(3, 6)).sum().backward()
        each.finalize_backward()
    assert_same_grads(model, other)


@on_ranks(by=["ours", "torch"])
def test_lazy_buckets_are_accepted_and_change_nothing(ranks, by):
    wrap = wrap_of(ranks, by)
    model, plain = wrap(net(), lazy_bucket_allocation=True), ranks.wrap(net())
    assert (model.lazy_bucket_allocation, plain.lazy_bucket_allocation) == (True, False)
    assert plain.should_finalize_after_backward is False
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(ranks.integers(3, 6, key=step)).sum().backward()
        assert_same_grads(model, plain)
