"""CPU replicas in threads of their own, as on a Python without a GIL.

Here `threads.has_gil` says that there is none, so that these tests run on each Python.
"""

import threading

import pytest
import torch
from drawn_programs import draw, run
from paceline._dp import threads
from paceline._dp.engine import Engine
from programs import cases, check, module
from replicas import Twin, assert_close, integers
from torch import nn
from torch.utils.checkpoint import checkpoint

N_PROGRAMS, FIRST_SEED = 60, 20261330
ON_THE_CPU = [case for case in cases() if case.values[1] == "cpu"]


@pytest.fixture(autouse=True)
def parallel(monkeypatch):
    """Run CPU replicas side by side; return a list, with one entry for each time."""
    noted, run_side_by_side = [], Engine._run_side_by_side

    def noting(self, tasks, **options):
        noted.append(len(tasks))
        return run_side_by_side(self, tasks, **options)

    monkeypatch.setattr(threads, "has_gil", lambda: False)
    monkeypatch.setattr(Engine, "_run_side_by_side", noting)
    return noted


# ---- programs -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "device"), ON_THE_CPU)
def test_a_program_does_as_with_the_plain_module(row, device):
    check(row, device)


@pytest.mark.filterwarnings("ignore:.* rows for each row of the batch")
def test_drawn_programs_do_as_the_plain_module(parallel):
    for seed in range(FIRST_SEED, FIRST_SEED + N_PROGRAMS):
        run(draw(seed))
    assert len(parallel) > N_PROGRAMS


# ---- forwards -----------------------------------------------------------------------


def test_each_replica_has_a_thread_and_its_share_of_torchs(wrap):
    def place(m, x):
        return threading.get_ident(), torch.get_num_threads()

    ours, mine = wrap(module(place), 3), threading.get_ident()
    torch.set_num_threads(7)
    try:
        assert ours(integers(7, 3)) == ([mine] * 3, [7] * 3)
        for _ in range(2):
            idents, n_threads = ours(integers(7, 3))
            assert idents[0] == mine
            assert len(set(idents)) == 3
            assert n_threads == [2] * 3
            assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    "held",
    [threading.Lock, threading.RLock, threading.local, torch.Generator],
    ids=["lock", "reentrant lock", "data of a thread", "generator"],
)
def test_a_module_with_an_object_of_one_thread_runs_in_order(wrap, held):
    made = module(lambda m, x: threading.get_ident())
    made.held = [held()]
    ours = wrap(made, 2)
    for _ in range(3):
        assert ours(integers(7, 3)) == [threading.get_ident()] * 2


def test_replicas_that_draw_random_numbers_run_in_order(wrap):
    ours = wrap(nn.Sequential(nn.Linear(3, 2), nn.Dropout()).double(), 2)
    found = []
    for _ in range(3):
        torch.manual_seed(3)
        found.append(ours(integers(8, 3)))
    torch.manual_seed(3)
    expected = [ours.module(part) for part in integers(8, 3).split(4)]
    for output in found:
        assert_close(output, torch.cat(expected))


def test_hooks_on_saved_tensors_see_those_of_all_replicas(wrap, parallel):
    def n_saved(model, x):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t) or t, lambda t: t
        ):
            model(x).sum().backward()
        return len(saved)

    ours = wrap(nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double(), 2)
    for _ in range(2):
        ours(integers(8, 3))
    assert parallel == [2]
    assert n_saved(ours, integers(8, 3)) == 2 * n_saved(ours.module, integers(4, 3))
    assert parallel == [2]


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("is_outside", [False, True])
def test_checkpoints_inside_and_around(wrap, is_reentrant, is_outside):
    options = {"use_reentrant": is_reentrant}

    def forward(m, x):
        return m.last(checkpoint(m.first, x, **options).square())

    def loss(model, x):
        out = checkpoint(model, x, **options) if is_outside else model(x)
        return out.square().sum()

    parts = {"first": nn.Linear(3, 5), "last": nn.Linear(5, 2)}
    twin = Twin(wrap, module(forward, **parts).double(), 3)
    for seed in range(4):
        twin.step(loss, integers(7, 3, seed=seed).requires_grad_(), exact=False)


class Reversed(nn.Module):
    """Registers hooks in its forward, as a layer that reverses gradients does."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.seen = []

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda grad: -grad)
        hidden = self.layer(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.seen.append(len(grad)))
        return self.last(hidden.sin()), hidden.cos()


def test_hooks_of_a_forward_run_once_in_each_replica(wrap):
    twin = Twin(wrap, Reversed(), 3)
    for seed in range(4):
        x = integers(7, 3, seed=seed).requires_grad_()
        twin.step(lambda model, x: model(x)[0].sum(), x, exact=False)
        twin.step(lambda model, x: model(x)[1].square().sum(), x, exact=False)
    # All lists are one: the attribute is the module's.
    assert sorted(twin.inner.seen) == sorted([3, 2, 2] * 8)
