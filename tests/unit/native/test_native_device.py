"""The native module's devices, and worlds and reducers on them: on simulated CUDA."""

import ctypes
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from natives import MIB, follow, make_world
from natives_on_device import (
    SIZES,
    backward,
    fake,
    fake_device,
    make_device,
    make_device_reducer,
    make_device_world,
    parameters,
    synchronize,
)
from paceline import _native
from paceline._compat import torch_core
from support import fake_gpus
from support.failing import FailsInBackward
from support.leaks import assert_leaves_nothing
from support.ranks import run_ranks, values


@pytest.fixture
def stream():
    """Provide the stream that torch would report as current."""
    with fake_device() as streams:
        yield streams


def step(params, scale=1):
    for p in params:
        p.grad = None
    sum((p * scale).sum() for p in params).backward()


# ---- Device -------------------------------------------------------------------------


def test_a_device_says_what_it_is(stream):
    device = make_device()
    assert (device.index, device.name) == (0, "cuda:0")
    assert device.kernels in ("fatbin", "nvrtc")
    device.synchronize()


def test_a_device_or_driver_that_is_not_there_is_named(stream, tmp_path):
    with pytest.raises(ValueError, match="99"):
        make_device(99)
    path = str(tmp_path / "libcuda.so.1")
    with pytest.raises(NotImplementedError, match=r"libcuda\.so\.1"):
        make_device(driver=path)
    with pytest.raises(NotImplementedError, match=r"^no CUDA driver \(.*libcuda"):
        _native.driver_version(path)


@pytest.mark.parametrize(
    ("ask", "least"),
    [(_native.driver_version, 11000), (_native.nccl_version, 20001)],
    ids=["driver", "nccl"],
)
def test_a_library_says_its_version(stream, ask, least):
    assert ask(fake_gpus.library()) >= least
    with pytest.raises(TypeError, match="must be str or None, not int"):
        ask(7)


# ---- World --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"device": 3}, TypeError, "device is 3: give a Device, or None"),
        ({"device": None}, ValueError, "0 without a device"),
        ({"device_bytes": -1}, ValueError, "device_bytes is -1"),
    ],
)
def test_bad_arguments_of_a_device_world_are_named(stream, changes, kind, words):
    given = {"device": make_device(), "device_bytes": MIB, **changes}
    with pytest.raises(kind, match=words):
        make_world(**given)


def test_only_words_of_a_device_world_are_in_its_buffer(stream):
    params = parameters(3, 1000)
    words_bytes = _native.measure(params, [], *SIZES[:2], [], make_device())[2]
    board_bytes = 256  # PLI_GPU_BOARD_BYTES, for data that ranks agree on
    assert memoryview(make_device_world(params)).nbytes == words_bytes + board_bytes


def test_a_device_without_memory_for_the_arena_raises_torchs_error():
    with (
        fake_device(f"schedule=early,capacity={MIB}"),
        pytest.raises(torch.cuda.OutOfMemoryError, match="device 0 is out of memory"),
    ):
        make_device_world(parameters(3 * MIB))


def test_parameters_elsewhere_are_named_with_both_places(stream):
    (param,) = parameters(3)
    device = make_device(dlpack_type=2)
    words = "parameter 0 is on the CPU, and the model's first .* on cuda:0 .*: have all"
    with pytest.raises(ValueError, match=words):
        _native.measure([param], [], *SIZES[:2], [], device)


def test_a_declared_sparse_parameter_is_dense_on_a_device(stream):
    params = parameters((1000, 100))
    measured = [
        _native.measure(params, [], *SIZES[:2], s, make_device())[0] for s in ([], [0])
    ]
    assert measured[0] == measured[1] > 400_000


# ---- steps --------------------------------------------------------------------------


def test_the_current_stream_is_asked_for_and_used(stream):
    stream.new()
    small, large, odd = params = parameters(3, 1000, (5, 40))
    reducer = make_device_reducer(params)
    for step in (1, 2):
        for p in params:
            p.grad = None
        backward((small, step), (large, 2.0 * step), (odd, 3.0))
        found = [p.grad.unique().tolist() for p in params]
        assert found == [[step], [2.0 * step], [3.0]]
    assert reducer.step == 2
    assert not reducer.is_active
    assert 0 < stream.asked < 30


# ---- lifetimes ----------------------------------------------------------------------


class FromArray(torch.autograd.Function):
    """Makes gradients over arrays, which die with them; records live arrays."""

    @staticmethod
    def forward(ctx, param, alive, seen):
        ctx.alive, ctx.seen, ctx.n = alive, seen, param.numel()
        return param.sum()

    @staticmethod
    def backward(ctx, g):
        import numpy as np

        ctx.seen.append([array() is not None for array in ctx.alive])
        array = np.ones(ctx.n, dtype=np.float32)
        ctx.alive.append(weakref.ref(array))
        return torch.from_numpy(array), None, None


@pytest.mark.parametrize(
    ("sizes", "alive_before"),
    [
        ((64, 64, 1024), [[], [False], [False, False]]),
        ((MIB, MIB, 1024), [[], [True], [True, True]]),
    ],
    ids=["until its bucket is posted", "until the last of its bucket has come"],
)
def test_a_large_gradient_lives(stream, sizes, alive_before):
    params = parameters(1000, 1000, 1000)
    reducer = make_device_reducer(params, sizes=sizes)
    for _ in range(3):
        alive, seen = [], []
        for p in params:
            p.grad = None
        sum(FromArray.apply(p, alive, seen) for p in params).backward()
        synchronize()
        assert not any(array() is not None for array in alive)
    assert reducer.step == 3
    assert seen == alive_before


def test_a_step_that_fails_drops_what_it_held(stream):
    params = parameters(1000, 1000)
    reducer = make_device_reducer(params)
    alive, seen = [], []
    failing = FailsInBackward.apply(params[0], ArithmeticError).sum()
    loss = failing + FromArray.apply(params[1], alive, seen)
    del failing
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert alive[0]() is None
    assert reducer.has_failed


class Busy:
    """Holds the interpreter's lock for a while when it is destroyed."""

    def __del__(self):
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass


def test_a_failed_backward_may_be_dropped_by_another_thread_later(stream, monkeypatch):
    """The engine's thread of a GPU does this after the caller has the exception."""
    params = parameters(1000, 1000)
    reducer = make_device_reducer(params)
    held = []

    def hold(call):
        held.append(call)
        queue(lambda: held.pop()())

    queue = torch_core.at_end_of_backward
    monkeypatch.setattr(torch_core, "at_end_of_backward", hold)
    torch_core.attach()
    loss = FailsInBackward.apply(params[1] * 1, ArithmeticError).sum() + params[0].sum()
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert reducer.is_active
    held.append(Busy())  # destroyed first, while this thread waits for the lock
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1)
    try:
        later = threading.Timer(0.05, held.clear)
        later.start()
        assert reducer.has_failed
        later.join()
    finally:
        sys.setswitchinterval(interval)
    reducer = follow(reducer, make_device_reducer(params))
    backward((params[0], 1), (params[1], 2))
    assert params[1].grad.unique().tolist() == [2.0]


def test_hundreds_of_devices_worlds_and_reducers_leave_nothing(stream):
    def make():
        params = parameters(3, 1000)
        buffers = {"mean": torch.ones(3)}
        reducer = make_device_reducer(params, [(buffers, "mean", False)])
        backward((params[0], 1), (params[1], 2))
        params[1].grad = None
        del reducer

    before = fake().fake_live_objects()
    assert_leaves_nothing(make, n=200, c_bytes=8192)
    assert fake().fake_live_objects() == before


# ---- capture ------------------------------------------------------------------------


def test_a_capture_before_the_order_is_known_asks_for_steps_before(stream):
    params = parameters(3, 1000)
    reducer = make_device_reducer(params)
    stream.new()
    words = r"run 3 whole steps .* on the capture's stream first"
    with stream.captured(), pytest.raises(RuntimeError, match=words):
        step(params)
    reducer = follow(reducer, make_device_reducer(params))
    step(params, 4)
    synchronize()
    assert [p.grad.unique().tolist() for p in params] == [[4.0]] * 2


# ---- broadcasts between two ranks ---------------------------------------------------


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


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="this torch asks CUDA for its own stream"
)
def test_tensors_on_the_cpu_go_by_the_words_of_a_device_world():
    assert values(run_ranks(send_words, 2)) == [4950, 4950]


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
            seen.append([t.unique().tolist() for t in parts])
            del world, device
    return seen


@pytest.mark.parametrize("which", ["the user's", "the device's own"])
def test_a_broadcast_is_behind_and_before_the_users_stream(which):
    for seen in values(run_ranks(send_in_every_order, 2, which)):
        assert seen == [[[8.0], [300_001.0], [2.0]]] * len(SCHEDULES)
