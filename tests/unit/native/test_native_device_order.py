"""The order of streams on devices, where the host looks at one of them first.

What is enqueued happens as late as can be: where the host waits for a stream, nothing
is done but what that stream waits for.  So a missing wait is a wrong number.
"""

import ctypes

import pytest
import torch
from natives_on_device import (
    backward,
    fake,
    fake_device,
    make_device,
    make_device_reducer,
    make_device_world,
    parameters,
)
from support.ranks import run_ranks, values
from test_native_device_ranks import meet

SCHEDULES = ["schedule=late", "schedule=random,seed=1", "schedule=random,seed=2"]


def look_first_at(which, stream, device):
    """Wait for the user's stream alone, or for the device's own first."""
    if which == "the device's own":
        device.synchronize()
    assert fake().cuStreamSynchronize(ctypes.c_void_p(stream.now)) == 0


def numbers(tensors):
    return [t.unique().tolist() for t in tensors]


def send_in_every_order(rank, n_ranks, which):
    seen = []
    for turn, options in enumerate(SCHEDULES):
        with fake_device(options) as stream:
            device = make_device()
            world = make_device_world(
                parameters(3), device=device, **meet(rank, n_ranks, f"address{turn}")
            )
            stream.new()
            parts = [torch.full((n,), float(rank + n)) for n in (7, 300_000, 1)]
            world.broadcast(parts, 1)
            look_first_at(which, stream, device)
            seen.append(numbers(parts))
            del world, device
    return seen


@pytest.mark.parametrize("which", ["the user's", "the device's own"])
def test_a_broadcast_is_behind_and_before_the_users_stream(which):
    for seen in values(run_ranks(send_in_every_order, 2, which)):
        assert seen == [[[8.0], [300_001.0], [2.0]]] * len(SCHEDULES)


def train_in_every_order(rank, n_ranks, which):
    """Small gradients alone: torch's memory of large ones is free before it is read."""
    seen = []
    for turn, options in enumerate(SCHEDULES):
        with fake_device(options) as stream:
            params = parameters(3, 5, (2, 7), 1)
            buffers = {"one": torch.zeros(3), "two": torch.zeros(4, 2).t()}
            device = make_device()
            reducer = make_device_reducer(
                params,
                [(buffers, name) for name in buffers],
                sizes=(64, 64, 1 << 20),
                device=device,
                **meet(rank, n_ranks, f"address{turn}"),
            )
            for step in range(1, 6):
                stream.new()
                for buffer in buffers.values():
                    buffer.fill_(step + 10 * rank)
                for p in params:
                    p.grad = None
                terms = ((p, i + step * (rank + 1)) for i, p in enumerate(params))
                sum((p * g).sum() for p, g in terms).backward()
                look_first_at(which, stream, device)
                grads = numbers(p.grad for p in params)
                reducer.apply_buffers()
                look_first_at(which, stream, device)
                seen.append((grads, numbers(buffers.values())))
            del reducer, device
    return seen


@pytest.mark.parametrize("which", ["the user's", "the device's own"])
def test_means_and_buffers_are_behind_and_before_the_users_stream(which):
    want = [
        ([[i + step * 1.5] for i in range(4)], [[float(step)]] * 2)
        for step in range(1, 6)
    ]
    for seen in values(run_ranks(train_in_every_order, 2, which)):
        assert seen == want * len(SCHEDULES)


def test_a_device_that_is_waited_for_has_done_everything():
    with fake_device("schedule=late") as stream:
        device = make_device()
        (param,) = parameters(3)
        reducer = make_device_reducer([param], device=device)
        stream.new()
        backward((param, 2))
        assert stream.asked > 0
        stream.now = 0
        param.grad = None
        (param * 3).sum().backward()
        device.synchronize()
        assert fake().fake_pending() == 0
        assert param.grad.tolist() == [3.0] * 3
        del reducer, device
