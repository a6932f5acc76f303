"""Ctrl-C at every moment of a step at which Python raises what a signal handler does.

These are the beginning of each function, and the end of each call of C.
"""

import itertools
import sys

import pytest
import torch
from paceline._dp import threads
from replicas import F64
from torch import nn


def interrupt(call, moment):
    """Run a call, and interrupt it at a moment; return whether it lasted so long."""
    n_left = moment

    def profile(frame, event, _):
        nonlocal n_left
        # Python ignores an exception of a generator that it closes.
        if event in ("call", "c_return") and frame.f_code.co_name != "<genexpr>":
            n_left -= 1
            if n_left == 0:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    assert n_left > 0, "nobody heard of the interrupt"
    return False


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4, **F64), nn.BatchNorm1d(4, **F64)
        self.last, self.log, self.scale = nn.Linear(4, 2, **F64), {"n": 0}, [2.0]

    def forward(self, x):
        self.n_rows = len(x)
        return self.last(self.norm(self.first(x)).relu()) * self.scale[0]


def state_of(model):
    """Return what a step leaves, beside gradients and buffers."""
    parts = [(name, sorted(vars(part))) for name, part in model.named_modules()]
    inside = threads.is_inside_replica(), len(threads._watched)
    return parts, inside, torch.get_num_threads(), torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("wrap", "has_gil"),
    [("cpu", True), ("cpu", False), ("gpu", True)],
    indirect=["wrap"],
)
def test_the_step_after_an_interrupt_is_as_without_it(wrap, has_gil, monkeypatch):
    monkeypatch.setattr(threads, "has_gil", lambda: has_gil)
    ours = wrap(Net())
    net, x = ours.module, torch.randn(6, 3, **F64).to(wrap.device())

    def step():
        ours.zero_grad()
        ours(x).square().sum().backward()

    def outcome():
        for buffer in net.buffers():
            buffer.zero_()
        step()
        assert net.n_rows == 3
        return [
            *(p.grad.clone() for p in net.parameters()),
            *map(torch.clone, net.buffers()),
        ]

    for _ in range(3):
        expected, state = outcome(), state_of(net)
    for moment in itertools.count(1):
        if not interrupt(step, moment):
            break
        torch.set_grad_enabled(True)  # torch's own no_grad() may be left on
        assert state_of(net) == state, moment
        assert all(map(torch.equal, outcome(), expected)), moment
    assert moment > 500
