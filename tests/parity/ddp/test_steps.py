"""Which backwards are averaged steps, and errors if ranks are in different steps."""

import contextlib
import gc
import time
import weakref

import paceline
import pytest
import torch
from cases import (
    Branches,
    as_torch,
    grads_of,
    integer_weights,
    net,
    on_gpus_too,
    on_ranks,
    step_of,
)
from support.failing import FailsInBackward
from torch import nn
from torch.utils.checkpoint import checkpoint


def data(ranks, step, rows=3, size=6):
    return ranks.integers(rows, size, key=("data", step))


# ---- backwards of the bare module ----------------------------------------------------


@as_torch(flag=["find_unused_parameters", "static_graph"])
def test_bare_backwards_beside_steps_that_leave_a_branch_out_are_local(
    ranks, wrap, flag
):
    model = wrap(integer_weights(Branches()), **{flag: True})
    x = data(ranks, 0, size=2)
    for _ in range(3):
        if flag == "static_graph":
            model.zero_grad()  # else torch waits for the next used parameters
        model(x, both=False).sum().backward()
        yield grads_of(model)
        if ranks.rank == 0:
            model.module(x).sum().backward()
        yield grads_of(model)


@as_torch()
def test_a_bare_backward_of_one_wrapper_beside_another_is_local(ranks, wrap):
    generator, critic = wrap(net(6, 4, 6)), wrap(net(6, 5, 1))
    for step in range(3):
        x = data(ranks, step)
        yield step_of(critic, generator(x).detach())
        if ranks.rank == 0:
            critic.zero_grad()
            critic.module(x).sum().backward()
        generator.zero_grad()
        critic(generator(x)).sum().backward()
        yield grads_of(generator)


@as_torch()
def test_a_dropped_wrapper_that_is_garbage_on_one_rank_disturbs_no_other(ranks, wrap):
    module = net()
    model = wrap(module)
    yield step_of(model, data(ranks, 0))
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
            yield step_of(anew, data(ranks, step))
    finally:
        gc.enable()


@on_ranks()
def test_a_wrapper_dropped_in_a_measured_step_is_freed_without_the_collector(ranks):
    model = ranks.wrap(net())
    gone = weakref.ref(model._session.reducer)
    model(data(ranks, 0))  # no backward
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


# ---- backwards that are steps --------------------------------------------------------


class TwoParts(nn.Module):
    """Keeps a loss beside its output, and has a method that programs call directly."""

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


class Hides(TwoParts):
    """Returns its output in an object that no library can search."""

    def forward(self, x):
        self.kept = self.first(x) + self.second(x)


class Circles(Hides):
    """Returns containers that contain themselves."""

    def forward(self, x):
        super().forward(x)
        circle = []
        circle.append({"again": (circle,)})
        return circle


@on_gpus_too()
@as_torch(asks=[True, False], hides=[None, Hides, Circles])
def test_the_attribute_is_read_in_forward(ranks, wrap, asks, hides):
    model = wrap(integer_weights(hides()) if hides else net())
    for step in range(3):
        model.require_backward_grad_sync = asks
        out = model(data(ranks, step))
        model.require_backward_grad_sync = not asks
        (model.module.kept if hides else out).sum().backward()
        yield grads_of(model)


@as_torch(order=["other first", "other last", "together"])
def test_a_method_of_the_module_beside_a_forward_is_in_the_step(ranks, wrap, order):
    model = wrap(integer_weights(TwoParts()))
    for step in range(3):
        x = data(ranks, step)
        model.zero_grad()
        losses = [model(x).sum(), 3 * model.module.other(x).sum()]
        if order == "together":
            losses = [sum(losses)]
        for loss in losses[:: -1 if order == "other first" else 1]:
            loss.backward()
        yield grads_of(model)


@as_torch(which=["kept", "returned"])
def test_a_loss_that_the_module_keeps_is_averaged(ranks, wrap, which):
    module = integer_weights(TwoParts())
    module.first.requires_grad_(which == "returned")
    model = wrap(module)
    for step in range(3):
        model.zero_grad()
        out = model(data(ranks, step), keeps=True)
        loss = model.module.kept
        (loss + out.sum() if which == "returned" else loss).backward()
        yield grads_of(model)


@on_gpus_too()
@as_torch(reentrant=[False, True])
def test_a_checkpointed_wrapper_takes_its_steps(ranks, wrap, reentrant):
    # torch's class needs this option.
    model = wrap(net(), static_graph=wrap == ranks.wrap_by_torch)
    for step in range(3):
        model.zero_grad()
        x = data(ranks, step).requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        yield grads_of(model)
        if ranks.rank == 0:
            model.zero_grad()
            model.module(x).sum().backward()


def in_parts(ranks, model, step):
    """Each rank splits its batch into its own number of parts."""
    parts = data(ranks, step, rows=6).chunk(1 + ranks.rank)
    return sum(model(part).sum() for part in parts)


def of_some_outputs(ranks, model, step):
    """Rank 1 does not use an output in its loss."""
    outs = [model(data(ranks, (step, i))).sum() for i in range(2)]
    return sum(outs[ranks.rank :])


def of_one_output(ranks, model, step):
    """Each rank uses only one of its losses, as if it were the best."""
    return [model(data(ranks, (step, i))).sum() for i in range(2)][ranks.rank]


def beside_an_evaluation(ranks, model, step):
    """Only rank 0 evaluates, without torch.no_grad()."""
    before = model.training
    out = model(data(ranks, step))
    if ranks.rank == 0:
        model.eval()(data(ranks, (step, "evaluation")))
    model.train(before)
    return out.sum()


@on_gpus_too()
@as_torch(
    loss_of=[in_parts, of_some_outputs, of_one_output, beside_an_evaluation],
    training=[True, False],
)
def test_ranks_may_use_different_numbers_of_forwards_in_a_step(
    ranks, wrap, loss_of, training
):
    if loss_of is beside_an_evaluation and not training:
        pytest.skip("an evaluation like training is a step that was skipped")
    model = wrap(net()).train(training)
    for step in range(3):
        model.zero_grad()
        loss_of(ranks, model, step).backward()
        yield grads_of(model)


# ---- ranks that are not in the same step ---------------------------------------------


def run_and_catch(ranks, model, skip, n_steps=5):
    """Train with the faults that `skip` selects; return errors and gradients."""
    errors, found = {}, {}
    for step in range(n_steps):
        model.zero_grad()
        try:
            skip(model, step)
            found[step] = grads_of(model)
        except (ArithmeticError, RuntimeError) as error:
            errors[step] = error
    return errors, found


@on_ranks(how=["trains", "trains in evaluation mode", "hides its output"])
def test_a_backward_that_one_rank_has_skipped_is_an_error_in_the_next_step(ranks, how):
    is_hidden = how == "hides its output"
    wrapped = ranks.wrap(integer_weights(Hides()) if is_hidden else net())
    wrapped.train(how != "trains in evaluation mode")

    def go(model, step):
        out = model(data(ranks, step))
        loss = (model.module.kept if is_hidden else out).sum()
        if (ranks.rank, step) == (1, 1):
            loss = FailsInBackward.apply(loss, ArithmeticError("in the loss"))
        loss.backward()

    errors, found = run_and_catch(ranks, wrapped, go, 5 - (ranks.rank != 1))
    mismatch = 2 if ranks.rank == 1 else 1
    kinds = {step: type(error) for step, error in errors.items()}
    skipped = {1: ArithmeticError} if ranks.rank == 1 else {}
    assert kinds == {**skipped, mismatch: paceline.MismatchError}
    words = str(errors[mismatch])
    assert "rank 0: 1, 0 of them without a backward" in words
    assert f"rank 1: 2, {int(not is_hidden)} of them without a backward" in words
    for later in (1, 2):  # afterwards all ranks have the same means
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


def test_a_gradient_that_cannot_be_given_back_hides_no_mismatch(ranks):
    first, last = nn.Linear(3, 200, bias=False), nn.Linear(200, 200, bias=False)
    is_last = []

    def change(_):
        if is_last:
            last.weight.data = torch.zeros(3, 3)

    first.weight.register_post_accumulate_grad_hook(change)
    model = ranks.wrap(nn.Sequential(first, last), gradient_as_bucket_view=True)
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        model(torch.ones(1, 3)).sum().backward()
    is_last.append(True)
    if ranks.rank:
        model(torch.ones(1, 3))
    with pytest.raises(paceline.MismatchError, match="not in the same step"):
        model(torch.ones(1, 3)).sum().backward()


def test_a_kept_loss_on_one_rank_and_an_output_on_the_other_is_an_error(ranks):
    model = ranks.wrap(integer_weights(TwoParts()), find_unused_parameters=True)
    out = model(data(ranks, 0), keeps=True)
    with pytest.raises(paceline.MismatchError, match="not in the same step"):
        (model.module.kept if ranks.rank else out.sum()).backward()
    step_of(model, data(ranks, 1))


# ---- a rank's own exception ----------------------------------------------------------


class Fails(nn.Linear):
    """Raises on request."""

    fails = True

    def forward(self, x):
        if self.fails:
            raise MemoryError("no room for an activation")
        return super().forward(x)


# For exceptions in other places see ../../ranks/test_drawn_exceptions.py.
@as_torch(joins=[False, True])
def test_each_rank_gets_its_own_exception_and_the_next_step_works(ranks, wrap, joins):
    model = wrap(integer_weights(Fails(6, 200)))
    for again in range(3):
        inside = model.join() if joins else contextlib.nullcontext()
        time.sleep(0.1 * ((ranks.rank + again) % ranks.n))  # the last rank differs
        with pytest.raises(MemoryError, match="for an activation"), inside:
            model(data(ranks, again))
    model.module.fails = False
    if not joins:
        yield step_of(model, data(ranks, "next"))
    elif wrap == ranks.wrap:  # torch's class may hang here
        grads = step_of(model, data(ranks, "next"))
        ranks.assert_same(grads, "gradients")


def test_a_forward_that_raises_is_no_error_if_all_ranks_leave_out_its_backward(ranks):
    """The module's own backward afterwards is local, as with torch's class."""
    model, x = ranks.wrap(Fails(6, 200)), data(ranks, 0)
    model.module.fails = ranks.rank > 0
    with pytest.raises(MemoryError) if ranks.rank else contextlib.nullcontext():
        model(x)
    ranks.all("skipped")
    model.module.fails = False
    ranks.assert_same(step_of(model, x), "gradients")
    model.module.fails = True
    with pytest.raises(MemoryError):
        model(x)
    model.module.fails = False
    assert not torch.equal(*ranks.all(step_of(model.module, x)[0]))


@on_gpus_too()
@on_ranks()
def test_rank_0_evaluates_alone(ranks):
    model = ranks.wrap(nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9)))
    for epoch in range(3):
        step_of(model.train(), data(ranks, epoch))
        if ranks.rank == 0:
            model.eval()
            with torch.no_grad():
                model(data(ranks, epoch))
            model(data(ranks, epoch))  # no backward follows
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                model(data(ranks, epoch, size=5))
            model.state_dict()
    ranks.assert_same(step_of(model.train(), data(ranks, "end")), "gradients")


@on_gpus_too()
def test_a_forward_is_not_stopped_by_a_step_that_a_peer_has_failed(ranks):
    model = ranks.wrap(net())
    step_of(model, data(ranks, 0))
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
    ranks.assert_same(step_of(model, data(ranks, 2)), "the next step")


def explode(gradient):
    raise ArithmeticError("in a hook")
