"""Ranks that catch drawn exceptions go on together, with exact means.

In each iteration each rank may raise: in forward, as its output is read, between
forward and backward (or be interrupted there), at the begin, in the middle or at the
end of backward, or after it.  FUZZ=500 draws 500
iterations, and FUZZ_SEED=7 draws those of seed 7, which a failure names.
"""

import collections
import contextlib
import os
import random
import time

import paceline
import pytest
import torch
import torch.distributed as dist
from support import fake_gpus
from support.failing import FailsInBackward
from support.hosts import Hosts
from support.ranks import run_ranks, values
from torch import nn

N_DRAWN = int(os.environ.get("FUZZ", "60"))
SEED = int(os.environ.get("FUZZ_SEED", random.randrange(1 << 30)))
PLACES = ("forward", "reading", "loss", "Ctrl-C", "output", "middle", "hook")
PLACES += ("optimizer",)
ODDS = (25, *[1] * len(PLACES))


class Net(nn.Module):
    """Has its input as the gradient of its weights; may fail in forward or backward."""

    def __init__(self, has_buffer):
        super().__init__()
        sizes = (3, 9000, 40000)
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in sizes)
        if has_buffer:
            self.register_buffer("seen", torch.zeros(3))

    def forward(self, x, place):
        if place == "forward":
            raise ArithmeticError(place)
        total = torch.zeros(())
        for weight in self.weights:
            total = total + (weight * x).sum()
            if place == "middle" and weight is self.weights[1]:
                total = FailsInBackward.apply(total, ArithmeticError)
        return Unread(total=total) if place == "reading" else total


class Unread(dict):
    """An output that cannot be read."""

    def values(self):
        raise ArithmeticError


def fail(*_):
    raise ArithmeticError


def take_step(model, x, mean, place):
    """Take a step, and check its gradients; raise at a place."""
    model.zero_grad()
    total = model(x, place)
    if place == "loss":
        fail()
    if place == "Ctrl-C":
        raise KeyboardInterrupt
    if place == "output":
        total = FailsInBackward.apply(total, ArithmeticError)
    with contextlib.ExitStack() as hooks:
        if place == "hook":
            hooks.callback(model.module.weights[0].register_hook(fail).remove)
        total.backward()
    for p in model.parameters():
        assert p.grad.unique().tolist() == [mean]
    if place == "optimizer":
        fail()


def train(rank, n_ranks, device, hosts, has_buffer, n):
    if hosts:
        Hosts((1,) * n_ranks).place(hosts[rank])
    rng = random.Random(SEED)
    alone = [
        [None] * k + ["middle"] + [None] * (n_ranks - k - 1) for k in range(n_ranks)
    ]
    drawn = [rng.choices((None, *PLACES), ODDS, k=n_ranks) for _ in range(n)]
    draw = [*alone, *drawn, *[[None] * n_ranks] * 4]
    delays = random.Random(SEED + rank)
    beside, raised, i = dist.new_group(), collections.Counter(), 0
    with fake_gpus.on_gpu(rank) if device == "gpu" else contextlib.nullcontext():
        model = paceline.DistributedDataParallel(Net(has_buffer))
        while i < len(draw):
            time.sleep(0.004 * delays.random())
            # Exact also if each rank divides its gradients before they are summed.
            x = torch.tensor(float(n_ranks * (8 * i + rank)))
            mean = n_ranks * (8 * i + (n_ranks - 1) / 2)
            try:
                take_step(model, x, mean, draw[i][rank])
            except paceline.MismatchError:
                latest = torch.tensor(i)
                dist.all_reduce(latest, dist.ReduceOp.MAX, group=beside)
                i = int(latest)
            except (ArithmeticError, KeyboardInterrupt, paceline.PeerError) as error:
                raised[type(error).__name__] += 1
            i += 1
        return model._session.reducer.n_taken, raised


WORLDS = [  # device, number of ranks, their hosts, and whether it has buffers
    ("cpu", 3, None, True),
    ("gpu", 2, None, False),
    *(
        pytest.param(*world, has_buffer, marks=pytest.mark.long)
        for has_buffer in (False, True)
        for world in [
            ("cpu", 2, None),
            ("cpu", 3, (0, 1, 1)),
            ("cpu", 4, (0, 1, 0, 1)),  # the process group carries all
            ("gpu", 3, None),
            ("gpu", 3, (0, 1, 1)),
        ]
    ),
]


@pytest.mark.parametrize(("device", "n_ranks", "hosts", "has_buffer"), WORLDS)
def test_ranks_that_catch_drawn_exceptions_go_on(device, n_ranks, hosts, has_buffer):
    print(f"FUZZ_SEED={SEED}")
    gpus = fake_gpus.environment() if device == "gpu" else {}
    env = {"FUZZ_SEED": str(SEED), **gpus}
    given, seconds = (device, hosts, has_buffer, N_DRAWN), 60.0 + N_DRAWN
    found = values(run_ranks(train, n_ranks, *given, timeout=seconds, env=env))
    assert len({n_taken for n_taken, _ in found}) == 1
    assert all(raised["PeerError"] for _, raised in found)
