"""What the tests of communication hooks share."""

import copy

import torch
from cases import assert_equal
from torch import nn


def both(ranks, module, hook, state=lambda ranks: ranks.group, **options):
    """Return our wrapper and torch's of equal models, each with the hook."""
    models = []
    for wrap in (ranks.wrap, ranks.wrap_by_torch):
        model = wrap(copy.deepcopy(module), **options)
        model.register_comm_hook(state(ranks), hook)
        models.append(model)
    return models


def check(ours, theirs, what):
    pairs = zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True)
    for (name, mine), p in pairs:
        grads = [
            t.grad.to_dense() if t.grad is not None and t.grad.is_sparse else t.grad
            for t in (mine, p)
        ]
        assert_equal(*grads, f"{what}: the gradient of {name}")
        assert_equal(mine, p, f"{what}: {name}")


def train_both(ranks, models, steps=4, loss=None, data=None):
    """Take the steps of both, and check each; every step moves the parameters."""
    loss = loss or (lambda model, x: model(x).square().sum())
    data = data or (
        lambda step: torch.randn(3, 6, generator=ranks.generator("data", step))
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    for step in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss(model, data(step)).backward()
            optimizer.step()
        check(*models, f"step {step}")


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 150), nn.Tanh(), nn.Linear(150, 70), nn.Tanh(), nn.Linear(70, 2)
    )


def reduced(state, bucket, then=None):
    tensor = bucket.buffer().div_(state.size())
    future = state.allreduce([tensor]).get_future()
    return future.then(then or (lambda fut: fut.value()[0]))


def chain(state, bucket):
    twice = reduced(state, bucket).then(lambda fut: fut.value() * 2)
    return twice.then(lambda fut: fut.value() + 1)


def chain_with_a_second_collective(state, bucket):
    def again(future):
        largest = future.value()[0].abs().max().reshape(1)
        state.allreduce([largest]).wait()
        return future.value()[0] + largest

    return reduced(state, bucket, again)


def by_hand(state, bucket):
    """Finish at once, without a future of a collective's."""
    state.allreduce([bucket.buffer()]).wait()
    future = torch.futures.Future()
    future.set_result(bucket.buffer() / state.size())
    return future


def exchanged(state, bucket):
    bucket.set_buffer(bucket.buffer() * 3)
    return reduced(state, bucket)


def by_parameter(state, bucket):
    """Scale each gradient in place, through its own view."""
    pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
    for gradient, parameter in pairs:
        assert gradient.shape == parameter.shape
        gradient.mul_(1.5 + parameter.dim())
    return reduced(state, bucket)


def as_doubles(state, bucket):
    """Come back with another dtype: it is converted."""
    bucket.set_buffer(bucket.buffer().double())
    return reduced(state, bucket)


class Countdown:
    """A callable object; it makes of gradients what depends on the bucket's number."""

    def __init__(self):
        self.__name__ = self.__qualname__ = "countdown"  # torch asks for them

    def __call__(self, state, bucket):
        bucket.buffer().mul_(2.0 + bucket.index() + 10 * bucket.is_last())
        return reduced(state, bucket)


OWN = {
    "chain": chain,
    "chain with a second collective": chain_with_a_second_collective,
    "by hand": by_hand,
    "set_buffer": exchanged,
    "gradients() and parameters()": by_parameter,
    "float64": as_doubles,
    "object": Countdown(),
}
