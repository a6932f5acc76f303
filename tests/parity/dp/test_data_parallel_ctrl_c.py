"""Ctrl-C at every moment of a step at which Python raises what a signal handler does.

These are the beginning of each function, and the end of each call of C.
"""

import itertools
import signal
import sys
import threading
import time

import pytest
import torch
from paceline._compat.torch_modes import has_saved_tensors_hooks
from paceline._dp import threads
from paceline._dp.thread_state import sees_operations
from programs import X, module
from replicas import F64, linear
from support.waiting import until
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
    return (
        parts,
        (threads.is_inside_replica(), len(threads._watched), torch.get_num_threads()),
        (torch.is_grad_enabled(), sees_operations(), has_saved_tensors_hooks()),
    )


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
        assert state_of(net) == state, moment
        assert all(map(torch.equal, outcome(), expected)), moment
    assert moment > 500


class One(Exception): ...


class Two(Exception): ...


def test_two_signals_at_once_leave_no_replica_at_work(wrap, monkeypatch):
    monkeypatch.setattr(threads, "has_gil", lambda: False)
    main, begun, sent, ended, is_long = threading.get_ident(), [], [], [], False

    def lasts(m, x):
        if threading.get_ident() != main and is_long:
            begun.append(1)
            until(lambda: len(sent) == len(begun))
            time.sleep(0.1)
            ended.append(1)
        return m.layer(x)

    def send():
        until(lambda: len(begun) > len(sent))
        for _ in range(2):
            for number in kinds:
                signal.pthread_kill(main, number)
            time.sleep(0.05)
        sent.append(1)

    def fail(number, _):
        raise kinds[number]

    kinds = {signal.SIGUSR1: One, signal.SIGUSR2: Two}
    before = {number: signal.signal(number, fail) for number in kinds}
    ours = wrap(module(lasts, layer=linear()))
    try:
        for _ in range(3):
            ours(X)
        is_long = True
        for n in range(1, 6):
            sender = threading.Thread(target=send)
            sender.start()
            with pytest.raises((One, Two)):
                ours(X)
            assert len(ended) == n
            assert not threads._watched
            sender.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
