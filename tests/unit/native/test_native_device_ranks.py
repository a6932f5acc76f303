"""The native module's reducer on devices: two processes, on the fakes."""

import os

import pytest
import torch
import torch.distributed as dist
from natives import make_world
from natives_on_device import (
    Fails,
    backward,
    fake_device,
    make_device,
    make_device_reducer,
    make_device_world,
    parameters,
    synchronize,
    with_backward_inside,
)
from paceline import PeerError, _native
from support import fake_gpus
from support.ranks import run_ranks, values
from torch import nn


def meet(rank, n_ranks, name="address"):
    """Return what World wants to know of the ranks."""
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


def on_two(function, *args):
    return values(run_ranks(function, 2, *args))


# ---- means --------------------------------------------------------------------------


def train(rank, n_ranks, options, accumulate="nccl", dtype=torch.float32):
    seen = []
    with fake_device(options) as stream:
        small, large, odd = params = parameters(3, 1000, (5, 40))
        for p in params:
            p.data = p.data.to(dtype)
        reducer = make_device_reducer(
            params, accumulate=accumulate, **meet(rank, n_ranks)
        )
        for step in range(1, 7):
            if options != "schedule=early":
                stream.new()
            for p in params:
                p.grad = None
            scale = step * (1 + 2 * rank)
            terms = [(small, scale), (large, 2 * scale), (odd, 4.0 * rank)]
            # Step 3: nobody uses the third; step 4: rank 1 alone.
            backward(*(terms[:2] if step == 3 or (step == 4 and rank == 0) else terms))
            seen.append([None if p.grad is None else p.grad.unique() for p in params])
        assert reducer.step == 6
        del reducer
    return seen


@pytest.mark.parametrize("accumulate", ["nccl", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_two_ranks_have_the_means_of_their_gradients(accumulate, dtype):
    for seen in on_two(train, "schedule=early", accumulate, dtype):
        for step, grads in enumerate(seen, 1):
            want = [2.0 * step, 4.0 * step, 2.0]
            if step == 3:
                want.pop()
                assert grads.pop() is None
            assert [g.tolist() for g in grads] == [[w] for w in want]


def train_small(rank, n_ranks, options):
    """Only small gradients: torch's memory of large ones is free before it is read."""
    with fake_device(options) as stream:
        params = parameters(3, 5, (2, 7), 1)
        buffers = {"one": torch.zeros(3), "two": torch.zeros(4, 2).t()}
        reducer = make_device_reducer(
            params,
            [(buffers, name) for name in buffers],
            sizes=(64, 64, 1 << 20),
            **meet(rank, n_ranks),
        )
        for step in range(1, 5):
            stream.new()
            for buffer in buffers.values():
                buffer.fill_(step + 10 * rank)
            for p in params:
                p.grad = None
            backward(*((p, i + step * (rank + 1)) for i, p in enumerate(params)))
            for i, p in enumerate(params):
                assert p.grad.unique().tolist() == [i + step * 1.5]
            reducer.apply_buffers()
            synchronize()
            for buffer in buffers.values():
                assert buffer.unique().tolist() == [step]
        del reducer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", ["late", "random"])
def test_means_are_right_however_late_the_devices_are(schedule, seed):
    on_two(train_small, f"schedule={schedule},seed={seed}")


# ---- gradients that come late, or not at all -----------------------------------------


def fire_again(rank, n_ranks):
    """From step 4 on the large one's gradient comes twice, on one rank."""
    with fake_device():
        params = small, large, last = parameters(3, 1000, 300)
        reducer = make_device_reducer(
            params, sizes=(64, 64, 1024), **meet(rank, n_ranks)
        )

        again = with_backward_inside(lambda: small.sum() + 4 * large.sum())

        seen = []
        for step in range(1, 7):
            for p in params:
                p.grad = None
            x = torch.ones(1, requires_grad=True)
            if step > 3 and rank == 1:
                x = again(x)
            (x.sum() + small.sum() + large.sum() + last.sum()).backward()
            synchronize()
            seen.append([p.grad.unique().tolist() for p in params])
        assert reducer.step == 6
        return seen


def test_gradients_that_come_after_their_bucket_was_posted_are_in_the_means():
    want = [[[1.0]] * 3] * 3 + [[[1.5], [3.0], [1.0]]] * 3
    assert on_two(fire_again) == [want, want]


# ---- failures -----------------------------------------------------------------------


def fail_once(rank, n_ranks):
    with fake_device():
        params = small, large = parameters(3, 1000)
        reducer = make_device_reducer(params, **meet(rank, n_ranks))
        said = []
        for step in range(1, 6):
            for p in params:
                p.grad = None
            reducer.forward_begins()
            loss = torch.zeros(1)
            if step == 3 and rank == 1:
                loss = Fails.apply(small)  # after the other's gradient has come
            loss = loss + (small * step).sum() + (large * step).sum()
            try:
                loss.backward()
            except (PeerError, OSError) as error:
                said.append(f"{type(error).__name__}: {error}")
                continue
            synchronize()
            means = [p.grad.unique().tolist() for p in params]
            assert means == [[float(step)]] * 2, step
        return said


def test_a_backward_that_fails_is_told_to_the_peers_and_left_behind():
    first, second = on_two(fail_once)
    assert second == ["OSError: no more"]
    assert len(first) == 1
    assert first[0].startswith("PeerError: ")
    assert "the step of rank 1 failed (step 3, in backward" in first[0]
    assert "OSError: no more" in first[0]


def die(rank, n_ranks):
    with fake_device():
        (param,) = parameters(1000)
        reducer = make_device_reducer([param], **meet(rank, n_ranks))
        backward((param, 1))
        if rank == 1:
            os._exit(3)
        param.grad = None
        with pytest.raises(PeerError, match="rank 1"):
            backward((param, 1))
        del reducer


def test_a_rank_that_dies_is_named():
    first, second = run_ranks(die, 2)
    assert first.is_ok, first
    assert second.exitcode == 3


# ---- buffers ------------------------------------------------------------------------


def share_buffers(rank, n_ranks):
    with fake_device():
        (param,) = parameters(1000)
        buffers = {
            "a": torch.full((5,), float(rank)),
            "mask": torch.tensor([rank == 0] * 3),
            "turned": torch.full((4, 3), float(rank)).t(),
            "holes": torch.full((6,), float(rank))[::2],
        }
        reducer = make_device_reducer(
            [param], [(buffers, name) for name in buffers], **meet(rank, n_ranks)
        )

        def read():
            synchronize()
            return [b.float().unique().tolist() for b in buffers.values()]

        loss = (param * buffers["a"][0]).sum() + (buffers["a"] * param[:5]).sum()
        loss.backward(retain_graph=True)
        loss.backward()  # what the graph has saved is as it was
        before, versions = read(), [b._version for b in buffers.values()]
        reducer.forward_begins()
        reducer.forward_ends(False, True)
        after = read()
        has_new = [
            b._version > v for b, v in zip(buffers.values(), versions, strict=True)
        ]
        backward((param, 1))
        for buffer in buffers.values():
            buffer.fill_(7 + rank)
        reducer.apply_buffers()
        return before, after, has_new, read()


def test_buffers_are_the_roots_from_the_next_forward_on():
    first, second = on_two(share_buffers)
    zero, one = [[0.0], [1.0], [0.0], [0.0]], [[1.0], [0.0], [1.0], [1.0]]
    assert first == (zero, zero, [False] * 4, [[7.0], [1.0], [7.0], [7.0]])
    # What somebody has written since is left alone.
    assert second == (one, zero, [True] * 4, [[8.0], [1.0], [8.0], [8.0]])


# ---- ranks that stand in, carriers, broadcasts ---------------------------------------


def stand_in(rank, n_ranks):
    with fake_device():
        params = small, large = parameters(3, 1000)
        reducer = make_device_reducer(params, **meet(rank, n_ranks))
        reducer.set_join(True, False)
        backward((small, 1), (large, 1 + rank))
        kept = large.grad
        if rank == 1:
            assert reducer.shadow_step(True, False) == (1, 1)
            synchronize()
            return kept.unique().tolist(), reducer.n_active
        small.grad = large.grad = None
        backward((small, 4), (large, 6))
        return small.grad.unique().tolist(), large.grad.unique().tolist()


def test_a_rank_that_stands_in_keeps_its_gradients_and_divides_by_the_active():
    assert on_two(stand_in) == [([4.0], [6.0]), ([1.5], 1)]


def send(rank, n_ranks):
    with fake_device():
        world = make_device_world(parameters(3), **meet(rank, n_ranks))
        big = torch.full((1_000_003,), float(rank))
        parts = [
            torch.full((7,), rank, dtype=torch.int64),
            big,
            torch.tensor(rank + 0.5),
        ]
        world.broadcast(parts, 1)
        synchronize()
        return [part.unique().tolist() for part in parts]


def test_tensors_of_any_rank_can_be_broadcast():
    assert on_two(send) == [[[1], [1.0], [1.5]]] * 2


def send_words(rank, n_ranks):
    """With a device whose tensors are not the CPU's: by the host's words alone."""
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


def embed(rank, n_ranks):
    with fake_device():
        table = nn.Embedding(10, 4, sparse=True)
        reducer = make_device_reducer([table.weight], sparse=[0], **meet(rank, n_ranks))
        for _ in range(3):
            table.weight.grad = None
            table(torch.tensor([rank, 3])).sum().backward()
            synchronize()
        assert reducer.step == 3
        grad = table.weight.grad.coalesce()
        return grad.indices()[0].tolist(), grad.values()[:, 0].tolist()


def test_sparse_gradients_have_the_rows_of_both_ranks():
    assert on_two(embed) == [([0, 1, 3], [0.5, 0.5, 1.0])] * 2


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
            seen.append(
                [
                    t.unique().tolist()
                    for t in (*(p.grad for p in params), *buffers.values())
                ]
            )
        return seen


def test_a_captured_step_is_replayed_on_both_ranks():
    first, second = on_two(capture)
    assert first == [[[1.5], [1.5], [1.0]], [[2.5], [2.5], [2.0]]]
    assert [s[:2] for s in second] == [s[:2] for s in first]
