"""What stands against worker processes for a moment: later calls have them again."""

import contextlib
import logging

import paceline
import pytest
import torch
import torch.utils.flop_counter
from replicas import Twin, assert_same_grads, integer_weights, integers, loss_of
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

pytestmark = pytest.mark.usefixtures("idle_workers")


class Leaving(nn.Module):
    """Two layers; leaves a result that wants a gradient, and a count, as attributes."""

    def __init__(self):
        super().__init__()
        self.first = integer_weights(nn.Linear(3, 4), 1)
        self.second = integer_weights(nn.Linear(4, 2), 2)
        self.n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        self.hidden = self.first(x)
        return self.second(self.hidden)


@pytest.fixture
def twin():
    wrappers = []

    def wrap(module, n):
        wrappers.append(paceline.DataParallel(module, ["cpu"] * n))
        return wrappers[-1]

    yield Twin(wrap, Leaving())
    wrappers[0].close()


@contextlib.contextmanager
def hook_of_a_part(model, rows):
    module = model.module if isinstance(model, nn.DataParallel) else model
    handle = module.second.register_forward_hook(
        lambda m, a, out: rows.append(len(out))
    )
    yield
    handle.remove()


@contextlib.contextmanager
def hook_of_all_modules(model, rows):
    def note(module, args, out):
        if isinstance(module, nn.Linear) and module.out_features == 2:
            rows.append(len(out))

    handle = register_module_forward_hook(note)
    yield
    handle.remove()


@contextlib.contextmanager
def a_method_of_its_own(model, rows):
    if not isinstance(model, nn.DataParallel):
        yield
        rows.append(7)
        return
    replicate = model.replicate

    def own(module, devices):
        rows.extend([4, 3])
        return replicate(module, devices)

    model.replicate = own
    yield
    del model.replicate


MOMENTS = {
    "a hook": (hook_of_a_part, "'second' (Linear) has hooks"),
    "hooks for all": (hook_of_all_modules, "hooks are registered for all modules"),
    "a method": (a_method_of_its_own, "has a replicate() of its own"),
}
CASES = pytest.mark.parametrize(("moment", "words"), MOMENTS.values(), ids=MOMENTS)


@CASES
def test_threads_are_for_the_calls_that_need_them(twin, moment, words):
    kinds, losses = [], ([], [])
    for k, surrounding in enumerate([None, moment, None, moment, None]):
        for model, kept in zip(twin.models, losses, strict=True):
            rows = []
            with surrounding(model, rows) if surrounding else contextlib.nullcontext():
                kept.append(loss_of(model(integers(7, 3, seed=k))))
                if model is twin.ours:
                    kinds.append(model.engine)
                    assert (words in model.engine_reason) is (surrounding is not None)
            if surrounding is not None:
                assert sorted(rows) == ([3, 4] if model is twin.ours else [7])
    assert kinds == ["process", "thread", "process", "thread", "process"]
    assert twin.ours.engine == "process"
    for mine, theirs in zip(*reversed(losses), strict=True):
        assert torch.equal(mine, theirs)
    for kept in losses:
        sum(kept).backward()  # graphs of processes and of threads, all at once
    assert_same_grads(twin.ours, twin.plain)
    # Threads share the module's numbers, as torch's replicas do.
    assert twin.inner.n_calls >= twin.plain.n_calls


@CASES
def test_what_is_over_before_the_first_call_leaves_processes(twin, moment, words):
    with moment(twin.ours, []), torch.no_grad():
        assert twin.ours.engine == "thread"
        twin.ours(integers(7, 3))
    assert twin.ours.engine == "process"
    for _ in range(2):
        twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))


def test_hooks_from_before_the_wrapping_may_go(caplog):
    module = Leaving()
    handle = module.first.register_forward_hook(lambda *_: None)
    with (
        torch.no_grad(),  # else it leaves a result that wants a gradient
        caplog.at_level(logging.INFO, "paceline"),
        paceline.DataParallel(module, ["cpu"] * 2) as ours,
    ):
        for _ in range(2):
            ours(integers(7, 3))
            assert ours.engine == "thread"
        assert len(caplog.records) == 1  # each reason is told once
        handle.remove()
        ours(integers(7, 3))
        assert ours.engine == "process"
        assert ours.engine_reason == "the model can be sent to worker processes"


def test_other_parameters_for_one_call_leave_processes(twin):
    x = integers(7, 3)
    twin.step(lambda model, x: loss_of(model(x)), x)
    twin.zero()
    for model in twin.models:
        early = loss_of(model(x))
        whole = nn.Sequential(model)  # torch refuses a wrapper itself
        other = {name: p * 2 for name, p in whole.named_parameters()}
        loss_of(torch.func.functional_call(whole, other, (x,))).backward()
        early.backward()
    twin.assert_same()
    assert twin.ours.engine == "process"
    twin.step(lambda model, x: loss_of(model(x)), x)


def test_the_engine_is_told_as_it_is_inside_a_mode(twin):
    twin.ours(integers(7, 3))
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert twin.ours.engine == "thread"
        assert "sees the operations" in twin.ours.engine_reason
    assert twin.ours.engine == "process"
