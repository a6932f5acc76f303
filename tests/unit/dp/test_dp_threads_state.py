"""Replicas that are threads: what torch keeps a thread, and random numbers."""

import contextvars
import copy
import logging
import random
import threading

import numpy as np
import pytest
import torch
from thread_cases import ROWS, Call, integers, where
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---- what torch keeps a thread ------------------------------------------------------


def told(probe):
    """Return a forward that tells what the probe sees, as a number a row."""
    return lambda module, x: torch.full((len(x),), float(probe()))


CODES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

PROBES = {
    "grad": (torch.no_grad, torch.is_grad_enabled),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "autocast dtype": (
        lambda: torch.autocast("cpu", torch.float16),
        lambda: CODES.index(torch.get_autocast_dtype("cpu")),
    ),
    "autocast cache": (
        lambda: torch.autocast("cpu", cache_enabled=False),
        torch.is_autocast_cache_enabled,
    ),
    "default device": (
        lambda: torch.device("meta"),
        lambda: torch.get_default_device().type == "meta",
    ),
    "anomaly": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", PROBES)
def test_replicas_see_the_state_of_the_callers_thread(wrap, name):
    context, probe = PROBES[name]
    seen = []
    wrapper = wrap(lambda module, x: seen.append((where(0, x)[0], probe())))
    for manager in (None, context(), None):
        seen.clear()
        expected = probe()
        if manager is None:
            wrapper(ROWS)
        else:
            with manager:
                expected = probe()
                wrapper(ROWS)
        assert [each for _, each in seen] == [expected] * 2
        assert len({int(ident) for ident, _ in seen}) == 2  # and side by side


def test_autocast_gives_the_dtype_and_the_gradients_of_the_plain_module(wrap):
    plain = integers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    results = []
    for model in (wrap(copy.deepcopy(plain)), plain):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(ROWS)
        output.float().sum().backward()
        results.append([output, *(p.grad for p in model.parameters())])
    assert results[0][0].dtype == torch.bfloat16
    assert all(map(torch.equal, *results))


def test_outputs_of_inference_mode_are_inference_tensors(wrap):
    wrapper = wrap(nn.Linear(2, 2))
    with torch.inference_mode():
        assert wrapper(ROWS).is_inference()
    assert wrapper(ROWS).requires_grad


def test_flushing_of_denormal_numbers_reaches_the_replicas(wrap):
    wrapper = wrap(lambda module, x: x / 4)
    wrapper(ROWS)
    x = torch.full((4,), 2e-38)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot")
        flushed = wrapper(x)
    finally:
        torch.set_flush_denormal(False)
    assert flushed.tolist() == [0.0] * 4  # where they are flushed, all look like zeros
    assert all(wrapper(x) > 0)


def test_context_variables_reach_the_replicas(wrap):
    variable = contextvars.ContextVar("variable", default=0)
    wrapper = wrap(told(variable.get))
    token = variable.set(3)
    assert wrapper(ROWS).tolist() == [3.0] * 4
    variable.reset(token)
    assert wrapper(ROWS).tolist() == [0.0] * 4


def test_hooks_on_saved_tensors_see_what_the_plain_module_saves(wrap):
    plain = Call(lambda m, x: (x * m.weight).sin())
    wrapper = wrap(copy.deepcopy(plain))
    x = ROWS.clone().requires_grad_()
    counts = []
    for model in (wrapper, plain):
        saved = []

        def pack(tensor, saved=saved):
            saved.append(threading.get_ident())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        counts.append(len(saved))
        assert set(saved) == {threading.get_ident()}
    assert counts[0] == 2 * counts[1]


def test_modes_of_the_caller_see_what_replicas_do(wrap):
    class Counting(torch.overrides.TorchFunctionMode):
        n = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.n += func is torch.sin
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        wrap(lambda module, x: torch.sin(x))(ROWS)
    assert mode.n == 2


def test_replicas_share_the_cores_and_give_them_back(wrap):
    n_cores = torch.get_num_threads()
    try:
        for n in (4, 2, 1):
            torch.set_num_threads(n)
            wrapper = wrap(told(torch.get_num_threads))
            assert wrapper(ROWS).tolist() == [max(1, n // 2)] * 4
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(n_cores)


# ---- random numbers -----------------------------------------------------------------


def test_the_first_forward_runs_in_order_and_later_ones_side_by_side(wrap):
    wrapper = wrap(where, is_new=True)
    assert len(set(wrapper(ROWS).tolist())) == 1
    assert len(set(wrapper(ROWS).tolist())) == 2
    wrapper.eval()
    assert len(set(wrapper(ROWS).tolist())) == 1
    assert len(set(wrapper(ROWS).tolist())) == 2
    wrapper.train()
    assert len(set(wrapper(ROWS).tolist())) == 2


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(()), random.random, np.random.random_sample],
    ids=["torch", "python", "numpy"],
)
def test_a_forward_that_draws_runs_in_order_and_can_be_repeated(wrap, draw):
    idents = []

    def forward(module, x):
        idents.append(threading.get_ident())
        return torch.full((len(x),), float(draw()))

    wrapper = wrap(forward, is_new=True)
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        runs.append([wrapper(ROWS).tolist() for _ in range(3)])
    assert runs[0] == runs[1]
    assert runs[0][0][0] != runs[0][0][3]
    assert set(idents) == {threading.get_ident()}


def test_dropout_differs_by_replica_and_is_repeated_by_the_seed(wrap):
    wrapper = wrap(nn.Dropout(0.5), is_new=True)
    x = torch.ones(4, 16)
    runs = []
    for _ in range(3):
        torch.manual_seed(3)
        runs.append(wrapper(x))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0][:2], runs[0][2:])


def test_the_callers_stream_is_that_of_replica_zero(wrap):
    wrapper = wrap(nn.Dropout(0.5), is_new=True)
    x = torch.ones(4, 16)
    for _ in range(2):
        torch.manual_seed(3)
        mine = wrapper(x), torch.rand(2)
        torch.manual_seed(3)
        theirs = wrapper.module(x[:2]), torch.rand(2)
        assert torch.equal(mine[0][:2], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def test_the_numbers_of_a_replica_do_not_depend_on_those_before(wrap):
    def forward(module, x):
        if x[0, 0] == 0:
            torch.rand(len(drawn))
        return torch.rand(len(x))

    drawn = []
    wrapper = wrap(forward, is_new=True)
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(wrapper(ROWS))
    assert torch.equal(drawn[0][2:], drawn[1][2:])
    assert not torch.equal(drawn[0][:2], drawn[1][:2])


def test_the_callers_stream_comes_back_after_a_failure(wrap):
    def forward(module, x):
        drawn = torch.rand(())
        if x[0, 0] > 0:
            raise ValueError
        return drawn

    wrapper = wrap(forward, is_new=True)
    torch.manual_seed(3)
    with pytest.raises(ValueError):
        wrapper(ROWS)
    mine = torch.rand(())
    torch.manual_seed(3)
    torch.rand(())
    assert torch.equal(mine, torch.rand(()))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_wrapper_repeats_the_random_numbers(
    wrap, use_reentrant
):
    wrapper = wrap(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), is_new=True)
    x = torch.ones(4, 16, requires_grad=True)
    for _ in range(2):
        x.grad = None
        output = checkpoint(wrapper, x, use_reentrant=use_reentrant)
        torch.rand(5)
        output.sum().backward()
        assert torch.equal(x.grad, output)


def test_a_draw_in_another_replica_alone_is_noticed(wrap):
    def forward(module, x):
        if x[0, 0] > 0:
            torch.rand(())
        return where(module, x)

    wrapper = wrap(forward, is_new=True)
    for _ in range(2):
        assert len(set(wrapper(ROWS).tolist())) == 1


def test_a_forward_that_begins_to_draw_is_noticed_and_runs_in_order(wrap, caplog):
    drawing = []

    def forward(module, x):
        if drawing:
            torch.rand(())
        return where(module, x)

    wrapper = wrap(forward, is_new=True)
    for _ in range(2):
        wrapper(ROWS)
    drawing.append(True)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert len(set(wrapper(ROWS).tolist())) == 2
    (record,) = caplog.records
    assert "drew random numbers" in record.getMessage()
    assert len(set(wrapper(ROWS).tolist())) == 1
