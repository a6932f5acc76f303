"""Gradients that streams write into memory that is reused: one rank, simulated CUDA.

Here the current stream itself writes gradients, as on a GPU.  Memory that is freed
returns to that stream at once, which overwrites it with its next work.  All work runs
as late as possible.  So if a gradient is copied on a wrong stream, or released before
its copy is enqueued, the test sees a wrong number.
"""

import ctypes
import math
import struct
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from natives import MIB
from natives_on_device import (
    fake,
    fake_device,
    make_device,
    make_device_reducer,
    parameters,
    synchronize,
)
from paceline._compat import torch_core

SPOILT = 0x5A


def number(byte):
    """Return the float32 whose four bytes all equal `byte`."""
    return struct.unpack("f", bytes([byte]) * 4)[0]


class Memory:
    """Allocates tensors, and keeps a record of their fate."""

    def __init__(self, stream):
        self.stream, self.blocks = stream, []
        self.n_freed = 0

    def fill(self, block, byte):
        """Have the current stream write one byte to all of a block."""
        stream = ctypes.c_void_p(self.stream.now)
        address, n_bytes = block.ctypes.data, ctypes.c_size_t(block.nbytes)
        status = fake().cuMemsetD8Async(
            ctypes.c_void_p(address), ctypes.c_ubyte(byte), n_bytes, stream
        )
        assert status == 0

    def empty(self, shape, strides):
        block = np.zeros(math.prod(shape), np.float32)
        self.blocks.append(block)
        lent = block[:]
        weakref.finalize(lent, self.spoil, block)
        return torch.from_numpy(lent).as_strided(shape, strides)

    def spoil(self, block):
        self.n_freed += 1
        self.fill(block, SPOILT)

    def filled(self, shape, byte):
        made = self.empty(shape, torch.empty(shape, device="meta").stride())
        self.fill(self.blocks[-1], byte)
        return made


class Makes(torch.autograd.Function):
    """Gives a parameter a gradient that a function makes in backward."""

    @staticmethod
    def forward(ctx, param, make):
        ctx.make = make
        return param.new_zeros(())

    @staticmethod
    def backward(ctx, g):
        return ctx.make(), None


def wait_for(stream):
    assert fake().cuStreamSynchronize(ctypes.c_void_p(stream.now)) == 0


class Carrier:
    """Doubles the only bucket, after the current stream's work is done.

    From then on the host may read a slot, as torch's own copies do here.
    """

    def __init__(self, stream, reducer, n_elems):
        self.stream, self.reducer = stream, weakref.ref(reducer)
        self.flat = torch.zeros(n_elems)

    def post(self, index):
        self.reducer().read_bucket(index, self.flat)
        wait_for(self.stream)

    def finish(self):
        self.reducer().write_bucket(0, self.flat.mul_(2))
        wait_for(self.stream)


@pytest.fixture
def stream():
    with fake_device("schedule=late") as streams:
        streams.new()
        yield streams


@pytest.fixture
def memory(stream):
    made = Memory(stream)
    yield made
    synchronize()


def step(memory, params, first):
    """Give each parameter a gradient filled with a different byte, from `first` on."""
    for p in params:
        p.grad = None
    made = [partial(memory.filled, p.shape, first + i) for i, p in enumerate(params)]
    sum(Makes.apply(p, make) for p, make in zip(params, made, strict=True)).backward()


# ---- copies after the writing stream ------------------------------------------------


def test_a_gradient_is_copied_behind_the_stream_that_made_it(stream, memory):
    """At the end, the first stream is current again and waits for nothing else."""
    params = parameters(3, 5, 7)
    reducer = make_device_reducer(params)
    streams = [stream.now]
    for _ in params:
        stream.new()
        streams.append(stream.now)

    def make(i, byte):
        stream.now = streams[1 + i]
        return memory.filled(params[i].shape, byte)

    def end():
        stream.now = streams[0]
        return torch.zeros(1)

    for first in (1, 11, 21, 31):
        for p in params:
            p.grad = None
        terms = [Makes.apply(torch.zeros(1, requires_grad=True), end)]  # the last one
        for i, p in enumerate(params):
            terms.append(Makes.apply(p, partial(make, i, first + i)))
        sum(terms).backward()
        assert stream.now == streams[0]
        wait_for(stream)
        for i, p in enumerate(params):
            assert p.grad.unique().tolist() == [number(first + i)]
    assert reducer.step == 4


def test_a_carrier_reads_and_writes_on_the_stream_that_is_current(stream, memory):
    params = parameters(3, 5)
    reducer = make_device_reducer(params)
    reducer.set_comm_hook(Carrier(stream, reducer, 8), MIB, MIB)
    for first in (1, 11, 21):
        step(memory, params, first)
        wait_for(stream)
        for i, p in enumerate(params):
            assert p.grad.unique().tolist() == [2 * number(first + i)]
    assert reducer.step == 3


def test_a_device_is_waited_for_with_what_only_its_own_stream_has(stream, memory):
    params = parameters(3, 5)
    device = make_device()
    reducer = make_device_reducer(params, sizes=(1, 1, MIB), device=device)
    stream.now = 0
    pending = []

    def look():
        """Check that the bucket of the other gradient is posted by now."""
        pending.append(fake().fake_pending())
        device.synchronize()
        pending.append(fake().fake_pending())
        return torch.ones(3)

    for _ in range(4):
        loss = Makes.apply(params[0], look)
        (loss + Makes.apply(params[1], partial(torch.ones, 5))).backward()
        synchronize()
    assert [n > 0 for n in pending[-4:]] == [True, False] * 2
    assert reducer.step == 4


# ---- lifetimes ----------------------------------------------------------------------


def test_a_large_gradient_lives_until_its_copy_is_enqueued(stream, memory):
    params = parameters(1000, 2000, (30, 40))
    reducer = make_device_reducer(params)
    for first in (1, 11, 21):
        step(memory, params, first)
        wait_for(stream)
        assert memory.n_freed == len(memory.blocks)
        for i, p in enumerate(params):
            assert p.grad.unique().tolist() == [number(first + i)]
    assert reducer.step == 3


@pytest.fixture
def watched(memory, monkeypatch):
    """Provide the memory that holds copies of gradients."""

    def empty_like(like):
        return memory.empty(like.shape, like.stride())

    monkeypatch.setattr(torch, "empty_like", empty_like)
    torch_core.attach()
    yield memory
    monkeypatch.undo()
    torch_core.attach()


@pytest.mark.parametrize("shape", [(4, 5), (40, 30)])
@pytest.mark.parametrize("came_before", [False, True], ids=["in it", "before it"])
def test_a_copy_in_other_strides_lives_until_the_step_has_copied_it(
    stream, watched, shape, came_before
):
    param, other = params = parameters(shape, 5)
    reducer = make_device_reducer(params)
    reducer.set_comm_hook(Carrier(stream, reducer, param.numel() + 5), MIB, MIB)
    for n in (1, 2, 3):
        param.grad = torch.full(shape[::-1], float(n)).t()
        other.grad = None
        losses = [(p * n).sum() for p in params]
        if came_before:
            reducer.sync = False
            losses.pop(0).backward()
            reducer.sync = True
        sum(losses).backward()
        wait_for(stream)
        assert param.grad.stride() == (1, shape[0])
        assert param.grad.unique().tolist() == [4.0 * n]
        assert watched.n_freed == len(watched.blocks) == n
    assert reducer.step == 3
