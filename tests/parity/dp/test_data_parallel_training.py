"""Whole trainings, step by step beside the plain module; and what they leave behind."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from replicas import (
    Twin,
    loss_of,
    reals,
    smooth_net,
)
from torch import nn

N_STEPS = 20
# Differences of one rounding grow with the steps; Adam divides by small numbers.
GROWN = 1e-9


def near(mine, theirs):
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        limit = GROWN * float(q.detach().abs().max())
        assert float((p.detach() - q.detach()).abs().max()) <= limit


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    ("n", "set_to_none"), [(2, True), (3, False)], ids=["2 replicas", "3 and zeros"]
)
def test_trainings_go_the_plain_way(wrap, make, n, set_to_none):
    twin = Twin(wrap, smooth_net(), n)
    optimizers = [make(model.parameters()) for model in twin.models]
    for step in range(N_STEPS):
        x, target = reals(7 + step % 3, 3, seed=step), reals(7 + step % 3, 2, seed=step)
        losses = []
        for model, optimizer in zip(twin.models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=GROWN)
        near(twin.ours, twin.plain)
    assert (twin.inner[0].weight != smooth_net()[0].weight).all()


def test_gradients_may_be_clipped_between(wrap):
    twin = Twin(wrap, smooth_net())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in twin.models]
    for step in range(5):
        x = reals(7, 3, seed=step)
        norms = []
        for model, optimizer in zip(twin.models, optimizers, strict=True):
            optimizer.zero_grad()
            (10 * model(x).square().sum()).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
        assert float(norms[0]) > 1
        assert float(norms[1]) == pytest.approx(float(norms[0]), rel=GROWN)
        near(twin.ours, twin.plain)
        nn.utils.clip_grad_value_(twin.inner.parameters(), 0.01)


def test_evaluation_between_steps_sees_the_newest_weights(wrap):
    twin = Twin(wrap, smooth_net())
    optimizers = [OPTIMIZERS["Adam"](m.parameters()) for m in twin.models]
    for step in range(4):
        x = reals(7, 3, seed=step)
        outs = []
        for model, optimizer in zip(twin.models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                outs.append(model(x))
            model.train()
        near(twin.ours, twin.plain)
        torch.testing.assert_close(outs[1], outs[0], rtol=GROWN, atol=GROWN)


# ---- what is left behind ------------------------------------------------------------


class Heavy(nn.Module):
    """Keeps about 2.5 MiB for the backward of a call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        y = x * self.weight
        for _ in range(4):
            y = y.tanh()
        return y.sum(1)


def resident_mib():
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


MOST_MIB = 60  # 200 graphs would be 500; what allocators keep is far less


def _abandon(ours, x):
    ours(x)


def _keep_one(ours, x):
    ours.kept = ours(x)


def _fail(ours, x):
    loss = ours(x).sum()
    loss.register_hook(_raise)
    with pytest.raises(RuntimeError, match="no gradient today"):
        loss.backward()


def _raise(grad):
    raise RuntimeError("no gradient today")


def _retain(ours, x):
    loss = ours(x).sum()
    loss.backward(retain_graph=True)


def _differentiate(ours, x):
    torch.autograd.grad(ours(x).sum(), [ours.module.weight])


def _train(ours, x):
    ours.zero_grad()
    ours(x).sum().backward()


ENDS = [_abandon, _keep_one, _fail, _retain, _differentiate, _train]


@pytest.fixture
def one_thread():
    """Run torch's operations by one thread: a busy machine makes teams of them slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__[1:])
def test_graphs_leave_no_memory_behind(wrap, end):
    ours = wrap(Heavy())
    x = torch.ones(128, 1024)
    for _ in range(20):
        end(ours, x)
    before = resident_mib()
    for _ in range(200):
        end(ours, x)
    assert resident_mib() - before < MOST_MIB


class Token:
    """Lives as long as the node of a graph that holds it."""


def test_outputs_and_graphs_are_freed_at_once(wrap):
    """By reference counts: with the collector off, nothing may wait for it."""
    ours = wrap(smooth_net())
    x = reals(7, 3)
    ours(x)
    gc.collect()
    gc.disable()
    try:
        out = ours(x)
        token = Token()
        out.grad_fn.metadata["token"] = token
        node, watched = weakref.ref(token), weakref.ref(out)
        del token
        loss = loss_of(out)
        del out
        loss.backward()
        del loss
        assert watched() is None
        assert node() is None
    finally:
        gc.enable()


def test_a_wrapper_and_its_module_are_freed(wrap):
    module = smooth_net()
    ours = wrap(module)
    loss_of(ours(reals(7, 3))).backward()
    watched = weakref.ref(ours), weakref.ref(module), weakref.ref(module[0].weight)
    del ours, module
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]
