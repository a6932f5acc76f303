"""Wrappers in several threads of a rank, and `launch` from threads."""

import threading

import paceline
import pytest
import torch
from support.threads import in_threads
from torch import nn


def make_net(k):
    torch.manual_seed(k)
    return nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 3))


def grads_of_steps(model, seed, n):
    """Return the gradients of n steps, each with other rows on each rank."""
    found = []
    for step in range(n):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(4, 5, generator=generator)
        model.zero_grad()
        model(x).tanh().sum().backward()
        found += [p.grad.clone() for p in model.parameters()]
    return found


def train_in_threads(is_compiled=False):
    """Train two wrappers in turn, then each in a thread; tell whether they agree."""
    rank = paceline.init().rank
    models = [paceline.DistributedDataParallel(make_net(k)) for k in range(2)]
    n = 3 if is_compiled else 20

    def train(k):
        model = models[k]
        if is_compiled:
            model = torch.compile(model, backend="aot_eager")
        return grads_of_steps(model, 10 * k + rank, n)

    pairs = zip([train(k) for k in range(2)], in_threads(train, 2), strict=True)
    return all(all(map(torch.equal, *pair)) for pair in pairs)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_two_wrappers_of_a_rank_may_step_in_two_threads(is_compiled):
    assert paceline.launch(train_in_threads, 2, is_compiled) == [True, True]


def test_launch_may_be_called_in_several_threads_at_once():
    def call(_):
        assert threading.current_thread() is not threading.main_thread()
        return paceline.launch(train_in_threads, 2)

    assert in_threads(call, 2) == [[True, True]] * 2
