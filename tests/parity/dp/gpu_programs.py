"""A program with a module, and the same with replicas of it on GPUs."""

import paceline
import torch
from replicas import (
    assert_same,
    assert_same_grads,
    assert_same_state,
    integer_weights,
    integers,
    loss_of,
)
from torch import nn

N_ROWS = 7
F64 = {"dtype": torch.float64}


def linear(*shape):
    return integer_weights(nn.Linear(*shape))


class Parent(nn.Module):
    """Something round a model: torch refuses functional calls of a wrapper itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def bare(model):
    """Return the module, whether it is behind a wrapper or not."""
    return model.module if isinstance(model, nn.DataParallel) else model


def compare(make, program, **options):
    """Run a program with a module, and with another one behind a wrapper.

    What it returns, gradients and state must be the same.
    """
    plain, ours = make(), paceline.DataParallel(make(), **options)
    torch.manual_seed(3)
    expected = program(plain)
    torch.manual_seed(3)
    assert_same(program(ours), expected, exact=False)
    assert_same_grads(ours, plain, exact=False)
    assert_same_state(ours, plain, exact=False)


def step(model, x, kept):
    """Run a forward and a backward; keep the output."""
    out = model(x)
    loss_of(out).backward()
    kept.append(out.detach())


def train(model, kept, optimizer=None, seeds=range(3)):
    """Take steps; keep their outputs."""
    for seed in seeds:
        if optimizer is not None:
            optimizer.zero_grad()
        step(model, integers(N_ROWS, 3, seed=seed), kept)
        if optimizer is not None:
            optimizer.step()
