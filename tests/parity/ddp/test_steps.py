"""What a step is: which backwards are averaged, and that all ranks are in the same one.

A program is a function of a way to wrap; it runs by torch's class and by Paceline's in
the same ranks, and what it returns is compared to the bit.
"""

import contextlib
import gc
import time

import paceline
import pytest
import torch
from cases import (
    Branches,
    FailsInBackward,
    assert_same_grads,
    compare_with_torch,
    grads_of,
    integer_weights,
    net,
    on_ranks,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


def data(ranks, step, rows=3, size=6):
    return ranks.integers(rows, size, key=("data", step))


def step_of(ranks, model, key):
    """Take one step; return its gradients."""
    model.zero_grad()
    model(data(ranks, key)).sum().backward()
    return grads_of(model)


# ---- backwards of the bare module ----------------------------------------------------


@on_ranks(where=["first rank", "last rank", "all ranks"])
def test_a_backward_of_the_bare_module_is_local(ranks, where):
    chosen = {"first rank": 0, "last rank": ranks.n - 1}.get(where, ranks.rank)

    def program(ranks, wrap):
        model, found = wrap(net()), []
        for step in range(4):
            found += step_of(ranks, model, step)
            if ranks.rank == chosen:
                model.zero_grad()
                model.module(data(ranks, ("bare", step))).square().sum().backward()
                found += grads_of(model)
        return found + step_of(ranks, model, "end")

    compare_with_torch(ranks, program)


def test_a_backward_of_the_bare_module_before_the_first_step_is_local(ranks):
    def program(ranks, wrap):
        model = wrap(net())
        for _ in range(ranks.rank):
            model.module(data(ranks, "bare")).sum().backward()
        return [*grads_of(model), *step_of(ranks, model, 0)]

    compare_with_torch(ranks, program)


@on_ranks(view=[False, True])
def test_gradients_of_bare_backwards_are_averaged_with_the_next_step(ranks, view):
    """The pattern of torch's own test_accumulate_gradients_module."""

    def program(ranks, wrap):
        model, found = wrap(net(), gradient_as_bucket_view=view), []
        with torch.no_grad():
            model.train()
            model.module(data(ranks, "no grad"))
        for step in range(4):
            runs = model.module if step % 2 == 0 else model
            runs(data(ranks, step)).sum().backward()
            found += grads_of(model)
        return found

    compare_with_torch(ranks, program)


@on_ranks(flag=["find_unused_parameters", "static_graph"])
def test_bare_backwards_beside_steps_that_leave_a_branch_out_are_local(ranks, flag):
    def program(ranks, wrap):
        model, found = wrap(integer_weights(Branches()), **{flag: True}), []
        x = data(ranks, 0, size=2)
        for _ in range(3):
            if flag == "static_graph":
                model.zero_grad()  # with the other, torch wants what is used next
            model(x, both=False).sum().backward()
            found += grads_of(model)
            if ranks.rank == 0:
                model.module(x).sum().backward()
            found += grads_of(model)
        return found

    compare_with_torch(ranks, program)


def test_a_bare_backward_of_one_wrapper_beside_another_is_local(ranks):
    def program(ranks, wrap):
        generator, critic, found = wrap(net(6, 4, 6)), wrap(net(6, 5, 1)), []
        for step in range(3):
            x = data(ranks, step)
            critic.zero_grad()
            critic(generator(x).detach()).sum().backward()
            found += grads_of(critic)
            if ranks.rank == 0:
                critic.zero_grad()
                critic.module(x).sum().backward()
            generator.zero_grad()
            critic(generator(x)).sum().backward()
            found += grads_of(generator)
        return found

    compare_with_torch(ranks, program)


def test_a_dropped_wrapper_that_is_garbage_on_one_rank_disturbs_no_other(ranks):
    def program(ranks, wrap):
        module = net()
        model = wrap(module)
        found = step_of(ranks, model, 0)
        gc.collect()
        gc.disable()
        try:
            if ranks.rank == 0:
                cycle = [model]
                cycle.append(cycle)
                del cycle
            del model
            anew = wrap(module)
            for step in range(1, 4):
                found += step_of(ranks, anew, step)
        finally:
            gc.enable()
        return found

    compare_with_torch(ranks, program)


# ---- backwards that are steps --------------------------------------------------------


class TwoParts(nn.Module):
    """Keeps a loss beside its output, and has a method that is called by itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)
        self.kept = None

    def forward(self, x, keeps=False):
        if keeps:
            self.kept = self.second(x).sum()
        return self.first(x)

    def other(self, x):
        return self.second(x)


@on_ranks(order=["other first", "other last", "together"])
def test_a_method_of_the_module_beside_a_forward_is_in_the_step(ranks, order):
    def program(ranks, wrap):
        model, found = wrap(integer_weights(TwoParts())), []
        for step in range(3):
            x = data(ranks, step)
            model.zero_grad()
            losses = [model(x).sum(), 3 * model.module.other(x).sum()]
            if order == "together":
                losses = [sum(losses)]
            for loss in losses[:: -1 if order == "other first" else 1]:
                loss.backward()
            found += grads_of(model)
        return found

    compare_with_torch(ranks, program)


@on_ranks(which=["kept", "returned"])
def test_a_loss_that_the_module_keeps_is_averaged(ranks, which):
    def program(ranks, wrap):
        module = integer_weights(TwoParts())
        module.first.requires_grad_(which == "returned")
        model, found = wrap(module), []
        for step in range(3):
            model.zero_grad()
            out = model(data(ranks, step), keeps=True)
            loss = model.module.kept
            (loss + out.sum() if which == "returned" else loss).backward()
            found += grads_of(model)
        return found

    compare_with_torch(ranks, program)


@on_ranks(reentrant=[False, True])
def test_a_checkpointed_wrapper_takes_its_steps(ranks, reentrant):
    def program(ranks, wrap):
        is_torch = wrap == ranks.wrap_by_torch  # which needs to be told
        model, found = wrap(net(), static_graph=is_torch), []
        for step in range(3):
            model.zero_grad()
            x = data(ranks, step).requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
            found += grads_of(model)
            if ranks.rank == 0:
                model.zero_grad()
                model.module(x).sum().backward()
        return found

    compare_with_torch(ranks, program)


def test_ranks_may_cut_their_batches_into_different_numbers_of_parts(ranks):
    def program(ranks, wrap):
        model, found = wrap(net()), []
        for step in range(3):
            model.zero_grad()
            parts = data(ranks, step, rows=6).chunk(1 + ranks.rank)
            sum(model(part).sum() for part in parts).backward()
            found += grads_of(model)
        return found

    compare_with_torch(ranks, program)


def test_a_rank_may_leave_an_output_out_of_its_loss(ranks):
    def program(ranks, wrap):
        model, found = wrap(net()), []
        for step in range(3):
            model.zero_grad()
            outs = [model(data(ranks, (step, i))).sum() for i in range(2)]
            sum(outs[ranks.rank :]).backward()
            found += grads_of(model)
        return found

    compare_with_torch(ranks, program)


# ---- ranks that are not in the same step ---------------------------------------------


def run_and_catch(ranks, model, skip, n_steps=5):
    """Train; what `skip` says goes wrong in its steps. Return errors and gradients."""
    errors, found = {}, {}
    for step in range(n_steps):
        model.zero_grad()
        try:
            skip(model, step)
            found[step] = grads_of(model)
        except (ArithmeticError, RuntimeError) as error:
            errors[step] = error
    return errors, found


def test_a_loss_that_is_to_count_for_nothing_holds_the_output(ranks):
    both = [ranks.wrap(net()), ranks.wrap_by_torch(net())]
    for model in both:
        loss = model(data(ranks, 0)).sum()
        (loss * 0 if ranks.rank == 1 else loss).backward()
    assert_same_grads(*both)


def test_a_backward_that_one_rank_has_skipped_is_an_error_in_the_next_step(ranks):
    def go(model, step):
        loss = model(data(ranks, step)).sum()
        if (ranks.rank, step) == (1, 1):
            loss = FailsInBackward.apply(loss, ArithmeticError("in the loss"))
        loss.backward()

    errors, found = run_and_catch(ranks, ranks.wrap(net()), go, 5 - (ranks.rank != 1))
    mismatch = 2 if ranks.rank == 1 else 1
    kinds = {step: type(error) for step, error in errors.items()}
    skipped = {1: ArithmeticError} if ranks.rank == 1 else {}
    assert kinds == {**skipped, mismatch: paceline.MismatchError}
    words = str(errors[mismatch])
    assert "rank 0: 1, 0 of them without a backward" in words
    assert "rank 1: 2, 1 of them without a backward" in words
    for later in (1, 2):  # and then all ranks have the same means
        ranks.assert_same(found[mismatch + later], f"step {later} after it")


def test_a_backward_that_one_rank_takes_twice_is_an_error_in_that_step(ranks):
    def go(model, step):
        loss = model(data(ranks, step)).sum()
        if (ranks.rank, step) == (0, 1):
            loss.backward(retain_graph=True)
        loss.backward()

    errors, found = run_and_catch(ranks, ranks.wrap(net()), go, 5 - (ranks.rank == 0))
    (step, error), *others = errors.items()
    assert not others
    assert step == 2 - (ranks.rank == 0)
    assert type(error) is paceline.MismatchError
    assert "rank 0: 0, 0 of them" in str(error)
    assert "rank 1: 1, 0 of them" in str(error)
    ranks.assert_same(found[step + 1], "the step after it")


def test_a_kept_loss_on_one_rank_and_an_output_on_the_other_is_an_error(ranks):
    model = ranks.wrap(integer_weights(TwoParts()), find_unused_parameters=True)
    out = model(data(ranks, 0), keeps=True)
    with pytest.raises(paceline.MismatchError, match="not in the same step"):
        (model.module.kept if ranks.rank else out.sum()).backward()
    step_of(ranks, model, 1)


def test_gradients_are_whole_after_ranks_were_not_in_the_same_step(ranks):
    model = ranks.wrap(net())
    for step in range(3):
        step_of(ranks, model, step)
    if ranks.rank:
        model(data(ranks, "dropped"))
    with pytest.raises(paceline.MismatchError, match="rank 1: 2, 1 of them"):
        step_of(ranks, model, "mismatch")

    def program(ranks, wrap):
        other = model if wrap == ranks.wrap else wrap(net())
        return [g for step in range(3) for g in step_of(ranks, other, step)]

    compare_with_torch(ranks, program)


# ---- a rank's own exception ----------------------------------------------------------


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.ones(4))
        self.fails = True

    def forward(self, x):
        if self.fails:
            raise ValueError("an error of this rank's own")
        return self.p * x


@on_ranks(joins=[False, True])
def test_each_rank_gets_its_own_exception_and_the_next_step_works(ranks, joins):
    def program(ranks, wrap):
        model = wrap(Raises())
        for again in range(3):
            model.module.fails = True
            inside = model.join() if joins else contextlib.nullcontext()
            time.sleep(0.1 * ((ranks.rank + again) % ranks.n))  # who is last differs
            with pytest.raises(ValueError, match="this rank's own"), inside:
                model(torch.ones(4))
        if joins and wrap == ranks.wrap_by_torch:
            return [torch.full((4,), (ranks.n + 1) / 2)]  # torch's may hang here
        model.module.fails = False
        model(torch.full((4,), float(ranks.rank + 1))).sum().backward()
        return grads_of(model)

    compare_with_torch(ranks, program)


def test_a_forward_is_not_stopped_by_a_step_that_a_peer_has_failed(ranks):
    model = ranks.wrap(net())
    step_of(ranks, model, 0)
    if ranks.rank == 1:
        loss = model(data(ranks, 1)).sum()
        handle = next(model.module.parameters()).register_hook(explode)
        with pytest.raises(ArithmeticError):
            loss.backward()
        handle.remove()
    ranks.all("it has failed")
    if ranks.rank == 0:
        out = model(data(ranks, 1))
        with pytest.raises(paceline.PeerError, match=r"the step of rank 1.* failed"):
            out.sum().backward()
    ranks.assert_same(step_of(ranks, model, 2), "the next step")


def explode(gradient):
    raise ArithmeticError("in a hook")
