"""The native module's reducer on devices: two processes, on simulated CUDA and NCCL.

In tests of order, enqueued work runs as late as possible.  If the host waits for a
stream, only the work runs that this stream depends on.  So a missing wait gives a wrong
number.
"""

import ctypes

import pytest
import torch
import torch.distributed as dist
from natives import make_world
from natives_on_device import (
    fake,
    fake_device,
    make_device,
    make_device_reducer,
    make_device_world,
    parameters,
    synchronize,
)
from paceline import _native
from support import fake_gpus
from support.ranks import run_ranks, values


def meet(rank, n_ranks, name="address"):
    """Return the arguments of RankWorld about the ranks."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        meeting = _native.Listener()
        store.set(name, meeting.address)
    else:
        meeting = store.get(name).decode()
    return {
        "rank": rank,
        "world_size": n_ranks,
        "pids": [0] * n_ranks,
        "meeting": meeting,
        "timeout": 20.0,
    }


def numbers(tensors):
    return [t.unique().tolist() for t in tensors]


def on_two(function, *args):
    return values(run_ranks(function, 2, *args))


def send_words(rank, n_ranks):
    """Test a device that does not take CPU tensors: ranks exchange only host words."""
    with fake_device():
        world = make_world(
            arena_bytes=256,
            device=make_device(dlpack_type=2),
            device_bytes=1 << 20,
            nccl=fake_gpus.library(),
            **meet(rank, n_ranks),
        )
        counts = torch.arange(100) + rank
        world.broadcast([counts], 0)
        return counts.sum().item()


def test_tensors_on_the_cpu_go_by_the_words_of_a_device_world():
    assert on_two(send_words) == [4950, 4950]


def capture(rank, n_ranks):
    with fake_device() as stream:
        params = parameters(3, 5)
        buffers = {"one": torch.full((3,), float(rank))}
        reducer = make_device_reducer(params, [(buffers, "one")], **meet(rank, n_ranks))
        stream.new()

        def step():
            for p in params:
                p.grad = None
            reducer.forward_begins()
            reducer.forward_ends(False, True)
            sum(p.sum() for p in params).backward()

        for _ in range(3):
            step()
            synchronize()
        with stream.captured() as graph:
            step()
        seen = []
        for k in (1, 2):
            for p in params:
                p.grad.fill_(k + rank)
            buffers["one"].fill_(k + 5 * rank)
            assert graph[0]() == 0
            synchronize()
            reducer.apply_buffers()
            synchronize()
            seen.append(numbers([*(p.grad for p in params), *buffers.values()]))
        return seen


def test_a_captured_step_is_replayed_on_both_ranks():
    first, second = on_two(capture)
    assert first == [[[1.5], [1.5], [1.0]], [[2.5], [2.5], [2.0]]]
    assert [s[:2] for s in second] == [s[:2] for s in first]


# ---- order --------------------------------------------------------------------------

SCHEDULES = ["schedule=late", "schedule=random,seed=1", "schedule=random,seed=2"]


def look_first_at(which, stream, device):
    """Wait for only the user's stream, or first for the device's own stream."""
    if which == "the device's own":
        device.synchronize()
    assert fake().cuStreamSynchronize(ctypes.c_void_p(stream.now)) == 0


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
    for seen in on_two(send_in_every_order, which):
        assert seen == [[[8.0], [300_001.0], [2.0]]] * len(SCHEDULES)


def train_in_every_order(rank, n_ranks, which):
    """Use small gradients: torch frees the memory of large ones before the check."""
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
    for seen in on_two(train_in_every_order, which):
        assert seen == want * len(SCHEDULES)
