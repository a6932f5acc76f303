"""CPU replicas in threads of their own, as on a Python without a GIL.

Here `threads.has_gil` says that there is none, so that these tests run on each Python.
"""

import threading

import pytest
import torch
from drawn_programs import draw, run
from paceline._dp import backwards, threads
from programs import cases, check, module
from replicas import Twin, assert_close, integers, reals, smooth_net
from torch import nn
from torch.utils.checkpoint import checkpoint

N_PROGRAMS, FIRST_SEED = 60, 20261330
ON_THE_CPU = [case for case in cases() if case.values[1] == "cpu"]


@pytest.fixture(autouse=True)
def cut(monkeypatch):
    """Run CPU replicas side by side; yield a list, one entry a forward with a cut."""
    made, original = [], backwards._cut

    def counting(*arguments):
        made.append(threading.get_ident())
        return original(*arguments)

    monkeypatch.setattr(threads, "has_gil", lambda: False)
    monkeypatch.setattr(backwards, "_cut", counting)
    return made


# ---- programs -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "device"), ON_THE_CPU)
def test_a_program_does_as_with_the_plain_module(row, device):
    check(row, device)


@pytest.mark.filterwarnings("ignore:.* rows for each row of the batch")
def test_drawn_programs_do_as_the_plain_module(cut):
    for seed in range(FIRST_SEED, FIRST_SEED + N_PROGRAMS):
        run(draw(seed))
    assert len(cut) > N_PROGRAMS // 4


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


# ---- backwards ----------------------------------------------------------------------


def twin_of(wrap, net=None, n=3):
    """Return a twin whose replicas run side by side from now on."""
    twin = Twin(wrap, net or smooth_net(), n)
    twin.step(lambda model, x: model(x).square().sum(), reals(7, 3), exact=False)
    return twin


def penalty(model, x):
    """Return the loss of a critic with a penalty on its gradient."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x + 1).mean() + (slope.norm(2, 1) - 1).square().mean()


def curvature(model, x):
    """Return a loss that has a gradient of a gradient of a gradient."""
    x = x.detach().requires_grad_()
    value = model(x).square().sum()
    for _ in range(3):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        value = slope.square().sum()
    return value


def twice(model, x):
    """Run two backwards through one graph, before that of the result."""
    out = model(x)
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    return out.square().sum()


@pytest.mark.parametrize("loss", [penalty, curvature, twice])
def test_a_loss_has_the_gradients_of_the_plain_module(wrap, cut, loss):
    twin = twin_of(wrap)
    for seed in range(3):
        twin.step(loss, reals(7, 3, seed=seed), exact=False)
    assert len(cut) >= 3


def test_a_batch_of_gradients_is_computed_but_not_recorded(wrap, cut):
    twin = twin_of(wrap)
    found = []
    for model in twin.models:
        x = reals(7, 3).requires_grad_()
        out = model(x).flatten()
        eye = torch.eye(len(out), dtype=out.dtype)
        options = {"is_grads_batched": True, "retain_graph": True}
        found += torch.autograd.grad(out, x, eye, **options)
    assert_close(*found, exact=False)
    with pytest.raises(NotImplementedError, match="one by one"):
        torch.autograd.grad(out, x, eye, create_graph=True, **options)
    assert cut


def test_gradients_of_one_replica_alone_and_of_none(wrap, cut):
    twin = twin_of(wrap)
    for used in (slice(-1, None), slice(1), slice(0)):
        twin.step(lambda model, x, k=used: model(x)[k].sum(), reals(7, 3), exact=False)
    assert len(cut) == 3


class Ending(nn.Module):
    """A layer, and a function of its output."""

    def __init__(self, last):
        super().__init__()
        self.layer, self.last = nn.Linear(3, 2).double(), last

    def forward(self, x):
        return self.last(self.layer(x))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


SCALE = nn.Parameter(torch.ones((), dtype=torch.float64))
WHOLE = {
    "a parameter outside": lambda h: h * SCALE,
    "a Function": Doubled.apply,
    "outputs of different parameters": lambda h: (h, h.detach() * SCALE),
    "an object": lambda h: (h, (threading.current_thread(),)),
}


@pytest.mark.parametrize("last", WHOLE.values(), ids=WHOLE)
def test_a_graph_that_leads_elsewhere_stays_where_it_is(wrap, cut, last):
    ours = wrap(Ending(last), 2)
    for _ in range(3):
        out = ours(integers(7, 3))
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert cut == []


def test_a_checkpoint_leaves_the_state_of_generators(wrap, cut):
    """Replicas compute theirs again in turn: each sets the state, and puts it back."""

    def forward(m, x):
        return m.last(checkpoint(lambda h: m.first(h).tanh(), x, use_reentrant=False))

    net = module(forward, first=nn.Linear(3, 5), last=nn.Linear(5, 2)).double()
    ours = wrap(net, 4)
    for seed in range(12):
        out = ours(reals(8, 3, seed=seed).requires_grad_())
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        out.sum().backward()
        assert torch.equal(torch.random.get_rng_state(), before)
    assert cut


@pytest.mark.parametrize("k", [0, 1], ids=["of replica 0", "of another"])
def test_an_error_in_a_backward_is_raised_and_leaves_all_cores(wrap, k):
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x):
            h = self.layer(x)
            if h.requires_grad and x[0, 0] == 9:
                h.register_hook(lambda grad: 1 / 0)
            return h.tanh()

    ours = wrap(Raises(), 2)
    torch.set_num_threads(2)
    try:
        for _ in range(2):
            ours(integers(8, 3)).sum().backward()
        x = integers(8, 3)
        x[4 * k, 0] = 9
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                ours(x).sum().backward()
            assert torch.get_num_threads() == 2
        ours(integers(8, 3)).sum().backward()
    finally:
        torch.set_num_threads(1)


def test_an_output_kept_past_the_return_is_an_error_and_no_wrong_gradient(wrap):
    """Its graph is the replica's own: two backwards would free it for one another."""
    kept = []

    def forward(m, x):
        h = m.layer(x).tanh()
        kept.append(h)
        return h.square()

    ours = wrap(module(forward, layer=nn.Linear(3, 2).double()), 2)
    ours(reals(6, 3)).sum().backward()
    kept.clear()
    out = ours(reals(6, 3))
    with pytest.raises(RuntimeError, match="second time"):
        (out.sum() + sum(h.sum() for h in kept)).backward()
