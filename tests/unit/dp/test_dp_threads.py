"""The thread engine: replicas as threads compute what the module does alone."""

import copy
import gc
import math
import signal
import subprocess
import sys
import threading
import time
import types
import weakref

import pytest
import torch
from paceline import DataParallel
from support.waiting import until
from thread_cases import ROWS, Call, integers, where
from torch import nn
from torch.utils.checkpoint import checkpoint

TWO = ["cpu", "cpu"]


# ---- it is the plain module ---------------------------------------------------------


def test_replicas_run_on_threads_of_their_own(wrap):
    idents = wrap(where)(ROWS).tolist()
    assert idents[:2] == [threading.get_ident()] * 2
    assert len(set(idents)) == 2


def test_threads_stay_from_forward_to_forward(wrap):
    wrapper = wrap(where, 3)
    assert wrapper(ROWS).tolist() == wrapper(ROWS).tolist()


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n_replicas", [2, 3])
def test_outputs_and_gradients_have_the_bits_of_the_plain_module(
    wrap, n_rows, n_replicas
):
    plain = integers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    wrapper = wrap(copy.deepcopy(plain), n_replicas, is_new=True)
    x = torch.arange(2.0 * n_rows).reshape(n_rows, 2)
    for _ in range(3):
        results = []
        for model in (wrapper, plain):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            output = model(leaf)
            output.square().sum().backward()
            grads = [p.grad for p in model.parameters()]
            results.append([output.detach(), leaf.grad, *grads])
        assert all(map(torch.equal, *results))


def test_double_backward_has_the_bits_of_the_plain_module(wrap):
    plain = integers(nn.Linear(2, 2, bias=False))
    results = []
    for model in (wrap(copy.deepcopy(plain)), plain):
        x = ROWS.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        grad.square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_around_and_inside_give_the_gradients_of_the_plain_module(
    wrap, use_reentrant
):
    class Inside(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    plain = integers(Inside(2, 2))
    wrapper = wrap(copy.deepcopy(plain))
    results = []
    for model in (wrapper, plain):
        x = ROWS.clone().requires_grad_()
        output = checkpoint(model, x, use_reentrant=use_reentrant)
        (output.square().sum() + model(x).sum()).backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


def test_a_recurrent_module_trains_as_it_does_alone(wrap):
    plain = nn.LSTM(2, 3, batch_first=True).double()
    wrapper = wrap(copy.deepcopy(plain))
    x = torch.randn(4, 5, 2).double()
    results = []
    for model in (wrapper, plain):
        output, _ = model(x)
        output.sum().backward()
        results.append([output, *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)  # sums in another order


def test_scripted_and_traced_modules_are_replicated(wrap):
    plain = integers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).eval()
    for module in (torch.jit.script(plain), torch.fx.symbolic_trace(plain)):
        wrapper = wrap(copy.deepcopy(module))
        assert torch.equal(wrapper(ROWS), plain(ROWS))
        assert torch.equal(wrapper(ROWS), plain(ROWS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_inside_and_around_are_replicated(wrap):
    plain = integers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    inside = torch.compile(copy.deepcopy(plain), backend="eager")
    around = wrap(copy.deepcopy(plain))
    alone = wrap(copy.deepcopy(plain))
    models = [wrap(inside), torch.compile(around, backend="eager"), alone]
    for _ in range(2):
        outputs = [model(ROWS) for model in models]
        assert torch.equal(outputs[0], outputs[2])
        assert torch.equal(outputs[1], outputs[2])
    for module in (inside._orig_mod, around.module):
        assert module[1].num_batches_tracked == 2
        assert torch.equal(module[1].running_mean, alone.module[1].running_mean)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_module_may_change_its_input_in_place(wrap, requires_grad):
    class Doubling(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    plain = integers(Doubling(2, 2))
    results = []
    for model in (wrap(copy.deepcopy(plain)), plain):
        x = ROWS.clone().requires_grad_(requires_grad)
        given = x * 1
        model(given).square().sum().backward()
        results.append([p.grad for p in model.parameters()])
        results[-1] += [x.grad] if requires_grad else [given]
    assert all(map(torch.equal, *results))


def test_inputs_of_inference_mode_can_be_given_outside_of_it(wrap):
    wrapper = wrap(nn.ReLU())
    with torch.inference_mode():
        x = ROWS.clone()
    assert torch.equal(wrapper(x), x)


# ---- replicas -----------------------------------------------------------------------


def test_parameters_can_be_listed_inside_a_forward(wrap):
    class Own(nn.Linear):
        def forward(self, x):
            seen.append(next(self.parameters()))
            return super().forward(x.to(seen[-1].dtype))

    seen = []
    wrapper = wrap(Own(2, 2))
    wrapper(ROWS)
    assert len(seen) == 2
    assert all(p is wrapper.module.weight for p in seen)


def test_replicas_tell_that_they_are_replicas(wrap):
    flags = wrap(lambda m, x: torch.full((len(x),), hasattr(m, "_is_replica")))(ROWS)
    assert flags.tolist() == [False, False, True, True]


def test_buffers_of_replica_zero_are_those_that_survive(wrap):
    def count(module, x):
        module.total += x.sum()
        return module.total.expand(len(x))

    module = Call(count)
    module.register_buffer("total", torch.zeros(()))
    wrapper = wrap(module)
    buffer = module.total
    assert wrapper(ROWS).tolist() == [6, 6, 22, 22]
    assert wrapper(ROWS).tolist() == [12, 12, 28, 28]
    assert module.total is buffer
    assert buffer.item() == 12


def test_batch_norm_keeps_the_statistics_of_replica_zero(wrap):
    plain = nn.BatchNorm1d(2)
    wrapper = wrap(copy.deepcopy(plain))
    wrapper(ROWS)
    plain(ROWS[:2])
    for mine, theirs in zip(wrapper.module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_buffer_that_requires_grad_gets_the_sum_of_the_gradients(wrap):
    module = Call(lambda m, x: x * m.scale)
    module.register_buffer("scale", torch.ones(2, requires_grad=True))
    wrap(module)(ROWS).sum().backward()
    assert module.scale.grad.tolist() == [12.0, 16.0]


def test_a_buffer_with_two_names_is_one_buffer_in_each_replica(wrap):
    module = Call(lambda m, x: torch.full((len(x),), m.first is m.second))
    module.register_buffer("first", torch.ones(1))
    module.register_buffer("second", module.first)
    module.register_buffer("none", None)
    assert wrap(module)(ROWS).all()


def test_a_part_with_two_names_is_one_part_in_each_replica(wrap):
    module = Call(lambda m, x: torch.full((len(x),), m.a is m.b and m.c is None))
    module.a = module.b = nn.Linear(1, 1)
    module.register_module("c", None)
    assert wrap(module)(ROWS).all()


def test_attributes_that_lead_to_parts_lead_to_those_of_the_replica(wrap):
    def same(module, x):
        found = [module.pair[0], module.table["part"], module.hidden]
        found.append(module.method.__self__)
        return torch.full((len(x),), all(each is module.part for each in found))

    module = Call(same)
    module.part = nn.Linear(1, 1)
    module.pair = [module.part, 1]
    module.table = {"part": module.part}
    module.method = module.part.forward
    object.__setattr__(module, "hidden", module.part)
    assert wrap(module)(ROWS).all()


def test_a_forward_that_was_replaced_on_the_object_runs_in_each_replica(wrap):
    module = nn.Linear(2, 2)
    module.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n += 1
        return torch.full((len(x),), id(self))

    module.forward = types.MethodType(forward, module)
    wrapper = wrap(module)
    idents = wrapper(ROWS).tolist()
    assert idents[0] == id(module)
    assert idents[3] != id(module)
    assert module.n == 1


def test_what_a_replica_assigns_is_lost_but_for_replica_zero(wrap):
    def note(module, x):
        module.seen = x[0, 0].item()
        return x

    wrapper = wrap(note)
    wrapper(ROWS)
    assert wrapper.module.seen == 0.0


def test_a_replicate_method_of_the_modules_own_is_called(wrap):
    class Own(nn.Linear):
        def _replicate_for_data_parallel(self):
            replica = super()._replicate_for_data_parallel()
            replica.mine = True
            return replica

        def forward(self, x):
            return torch.full((len(x),), hasattr(self, "mine"))

    assert wrap(Own(1, 1))(ROWS).tolist() == [False, False, True, True]


def test_hooks_run_in_each_replica(wrap):
    module = nn.Linear(2, 2)
    calls = []
    module.register_forward_pre_hook(lambda m, args: calls.append("pre"))
    module.register_forward_hook(lambda m, args, out: calls.append("forward"))
    module.register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    wrap(module)(ROWS.clone().requires_grad_()).sum().backward()
    assert sorted(calls) == ["backward"] * 2 + ["forward"] * 2 + ["pre"] * 2


def test_hooks_on_parameters_see_the_whole_gradient_once(wrap):
    module = nn.Linear(2, 1)
    seen = []
    module.weight.register_hook(seen.append)
    wrap(module)(ROWS).sum().backward()
    assert [grad.tolist() for grad in seen] == [[[12.0, 16.0]]]


def test_weight_and_spectral_norm_train_in_replicas(wrap):
    for norm in (
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
    ):
        torch.manual_seed(0)
        plain = norm(nn.Linear(2, 2).double())
        plain.eval()  # training moves spectral_norm's vectors
        wrapper = wrap(copy.deepcopy(plain))
        for model in (wrapper, plain):
            model(ROWS.double()).sum().backward()
        for mine, theirs in zip(wrapper.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)  # another order


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_is_refused_with_the_words_of_torch(wrap):
    wrapper = wrap(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        wrapper(ROWS)
    wrapper.module(ROWS)
    assert torch.equal(wrapper(ROWS), wrapper.module(ROWS))


def test_a_parameter_on_another_device_is_refused_with_the_words_of_torch(wrap):
    wrapper = wrap(nn.Linear(2, 2))
    wrapper.module.to("meta")
    with pytest.raises(
        RuntimeError, match=r"on device cpu \(device_ids\[0\]\) but fou"
    ):
        wrapper(ROWS)


def test_a_wrapper_inside_a_replica_calls_its_module_plainly(wrap):
    inner = wrap(where)
    inner(ROWS)  # has threads of its own
    idents = wrap(nn.Sequential(inner))(ROWS).tolist()
    assert idents[0] == idents[1] == threading.get_ident()
    assert idents[2] == idents[3] != threading.get_ident()


def test_two_threads_of_the_caller_may_use_one_wrapper(wrap):
    wrapper = wrap(integers(nn.Linear(2, 2)))
    expected = wrapper.module(ROWS)
    right = []

    def use():
        right.append(all(torch.equal(wrapper(ROWS), expected) for _ in range(50)))

    callers = [threading.Thread(target=use) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 3


# ---- exceptions ---------------------------------------------------------------------


class Coded(Exception):
    def __init__(self, code, text):
        super().__init__(f"{text} ({code})")
        self.code = code


class Wordy(Exception):
    def __str__(self):
        return "always the same"


def failing(error, rows):
    def forward(module, x):
        if any(row in rows for row in x[:, 0].tolist()):
            raise error
        return x

    return forward


@pytest.mark.parametrize("is_new", [True, False], ids=["in order", "side by side"])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("broken"),
        KeyError("broken"),
        Coded(5, "broken"),
        FileNotFoundError(2, "broken", "name"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_keep_their_type_and_name_replica_and_device(wrap, error, is_new):
    wrapper = wrap(failing(error, [4.0]), is_new=is_new)
    with pytest.raises(type(error)) as caught:
        wrapper(ROWS)
    name = type(error).__name__
    text = str(caught.value) + str(caught.value.__cause__)
    assert f"Caught {name} in replica 1 on device cpu.\nOriginal Traceback" in text
    assert "in forward\n    raise error\n" in text  # lines, not one escaped string
    assert "broken" in text
    assert getattr(caught.value, "code", 5) == 5
    assert error.args[0] in (2, "broken", "broken (5)")  # theirs is as it was
    assert torch.equal(wrapper(torch.zeros(4, 2)), torch.zeros(4, 2))


def test_exceptions_that_write_their_own_message_are_told_by_their_cause(wrap):
    with pytest.raises(Wordy, match="always the same") as caught:
        wrap(failing(Wordy(), [4.0]))(ROWS)
    assert "in replica 1 on device cpu" in str(caught.value.__cause__)


@pytest.mark.parametrize("is_new", [True, False], ids=["in order", "side by side"])
def test_of_several_failures_that_of_the_lowest_replica_is_raised(wrap, is_new):
    wrapper = wrap(failing(ValueError("broken"), [2.0, 4.0, 6.0]), 4, is_new=is_new)
    with pytest.raises(ValueError, match="in replica 1 on"):
        wrapper(ROWS)


def test_a_replica_that_exits_is_an_error_and_not_an_exit(wrap):
    def leave(module, x):
        if x[0, 0] > 0:
            sys.exit(3)
        return x

    with pytest.raises(RuntimeError, match="Caught SystemExit in replica 1"):
        wrap(leave)(ROWS)


def test_an_interrupt_waits_for_the_other_replicas_and_leaves_all_usable(wrap):
    ended = []

    def forward(module, x):
        if x[0, 0] == 0:
            signal.raise_signal(signal.SIGINT)
        elif x[0, 0] == 4:
            time.sleep(0.2)
            ended.append(True)
        return x

    wrapper = wrap(forward)
    with pytest.raises(KeyboardInterrupt):
        wrapper(ROWS)
    assert ended == [True]
    assert torch.equal(wrapper(ROWS + 1), ROWS + 1)


def test_an_interrupt_while_waiting_comes_after_the_replicas(wrap):
    ended = []

    def forward(module, x):
        if x[0, 0] == 4:
            time.sleep(0.2)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
            ended.append(True)
        return x

    wrapper = wrap(forward)
    with pytest.raises(KeyboardInterrupt):
        wrapper(ROWS)
    assert ended == [True]
    assert torch.equal(wrapper(ROWS + 1), ROWS + 1)


# ---- nothing leaks ------------------------------------------------------------------


def own_threads():
    return [t for t in threading.enumerate() if t.name.startswith("paceline-replica")]


def test_threads_end_with_close_and_with_the_wrapper(wrap):
    before = len(own_threads())
    wrapper = wrap(where, 3)
    wrapper(ROWS)
    assert len(own_threads()) == before + 2
    wrapper.close()
    assert len(own_threads()) == before
    other = DataParallel(Call(where), TWO, engine="thread")
    for _ in range(2):
        other(ROWS)
    assert len(own_threads()) == before + 1
    del other
    assert until(lambda: len(own_threads()) == before)


def test_a_forward_leaves_no_cycles_and_no_references_behind(wrap):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    seen = []
    module.register_forward_hook(lambda m, args, out: seen.append(weakref.ref(m)))
    wrapper = wrap(module)
    gc.collect()
    gc.disable()
    try:
        x = ROWS.clone().requires_grad_()
        output = wrapper(x)
        output.sum().backward()
        gone = weakref.ref(output)
        del output
        assert gone() is None
        kept = [ref() for ref in seen if ref() is not None]
        assert len(seen) == 2
        assert len(kept) == 1
        assert kept[0] is module
    finally:
        gc.enable()


def test_a_failing_forward_leaves_no_references_behind(wrap):
    def forward(module, x):
        refs.append(weakref.ref(x))
        raise ValueError

    refs = []
    wrapper = wrap(forward)
    gc.disable()
    try:
        with pytest.raises(ValueError):
            wrapper(ROWS.clone())
        assert [ref() for ref in refs] == [None] * 2
    finally:
        gc.enable()


def run(code):
    """Run code in a fresh interpreter; return what it printed, without errors."""
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.strip()


PREAMBLE = """
import torch
torch.set_num_threads(2)
from paceline import DataParallel
model = DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"], engine="thread")
for _ in range(3):
    output = model(torch.ones(4, 2))
"""


def test_the_interpreter_ends_with_threads_that_wait():
    assert run("print('end')") == "end"


def test_a_forked_child_starts_threads_of_its_own():
    code = """
import os, signal, warnings
warnings.simplefilter("ignore")  # Python 3.12 and later advise against it
torch.set_num_threads(1)  # OpenMP itself does not survive a fork
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    right = torch.equal(model(torch.ones(4, 2)), output)
    os._exit(0 if right else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run(code) == "0"


def test_training_in_float32_stays_close_to_the_plain_module(wrap):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    wrapper = wrap(copy.deepcopy(plain), is_new=True)
    losses = []
    for model in (wrapper, plain):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(torch.randn(12, 8)).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert math.isclose(*losses, rel_tol=1e-4)  # sums in another order, 20 steps
