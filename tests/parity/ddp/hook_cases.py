"""Helpers for tests of communication hooks, and a plain loop."""

import torch
from torch import nn


def hooked(ranks, wrap, module, hook, state=lambda ranks: ranks.group, **options):
    """Return a wrapped model with the hook."""
    model = wrap(module, **options)
    model.register_comm_hook(state(ranks), hook)
    return model


def trained(ranks, model, steps=4, loss=None, data=None, optimizer=None):
    """Take steps; after each, yield gradients and parameters."""
    loss = loss or (lambda model, x: model(x).square().sum())
    data = data or (
        lambda step: torch.randn(3, 6, generator=ranks.generator("data", step))
    )
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, data(step)).backward()
        optimizer.step()
        grads = [p.grad for p in model.parameters()]
        yield [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
        yield [*model.parameters()]


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
    """Finish at once, without the future of a collective."""
    state.allreduce([bucket.buffer()]).wait()
    future = torch.futures.Future()
    future.set_result(bucket.buffer() / state.size())
    return future


def exchanged(state, bucket):
    bucket.set_buffer(bucket.buffer() * 3)
    return reduced(state, bucket)


def by_parameter(state, bucket):
    """Scale each gradient in place, through its view."""
    pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
    for gradient, parameter in pairs:
        assert gradient.shape == parameter.shape
        gradient.mul_(1.5 + parameter.dim())
    return reduced(state, bucket)


def as_doubles(state, bucket):
    """Return another dtype, which is then converted."""
    bucket.set_buffer(bucket.buffer().double())
    return reduced(state, bucket)


class Countdown:
    """A callable hook whose result depends on the bucket's number."""

    def __init__(self):
        self.__name__ = self.__qualname__ = "countdown"  # torch reads them

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
