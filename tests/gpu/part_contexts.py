"""Groups of devices that are contexts of one GPU: see contexts.c.

Between GPUs, data moves by copies that name two contexts, after events of the other
context.  `device_ids=[0, 0]` never uses either.  torch sees only one GPU, so tensors
here are CPU tensors for torch, whose memory belongs to a context.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import subprocess
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import part_build
import torch
from checks import is_fake, run_here, simulated
from paceline import _native
from paceline._compat import torch_core
from torch import Tensor

N = 3
MIB = 1 << 20
N_ROUNDS = 200
SOURCE = Path(__file__).with_name("contexts.c")
CUDA_VERSION = 12000


@cache
def library() -> ctypes.CDLL:
    """Compile and load the driver of contexts.c."""
    path = part_build.BUILT / "libcontexts.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [os.environ.get("CC", "gcc"), "-O2", "-shared", "-fPIC", str(SOURCE)]
    subprocess.run([*command, "-o", str(path), "-ldl", "-pthread"], check=True)
    if is_fake():
        os.environ["CONTEXTS_DRIVER"] = simulated().library()
    return ctypes.CDLL(str(path))


def call(name: str, *arguments: Any) -> None:
    address = ctypes.c_void_p()
    why = ctypes.c_int()
    asked = name.encode(), ctypes.byref(address), CUDA_VERSION, ctypes.c_uint64(1)
    result = library().cuGetProcAddress_v2(*asked, ctypes.byref(why))
    assert result == 0, f"the driver has no {name}"
    assert address.value, f"the driver has no {name}"
    result = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)(*arguments)
    assert result == 0, f"{name}: error {result} of the driver"


class Member:
    """One context: its memory, its stream, and the native device."""

    def __init__(self, index: int) -> None:
        driver = library()._name
        nvrtc = part_build.nvrtc_path()
        if is_fake():
            nvrtc = simulated().library()
        self.device = _native.Device(index, driver=driver, nvrtc=nvrtc, dlpack_type=1)
        self._context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), index)
        stream = ctypes.c_void_p()
        with self:
            call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        self.stream = int(stream.value or 0)

    def __enter__(self) -> None:
        call("cuCtxPushCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        call("cuCtxPopCurrent", ctypes.byref(ctypes.c_void_p()))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        like = torch.empty(shape, dtype=dtype)
        address = ctypes.c_uint64()
        with self:
            n_bytes = ctypes.c_size_t(max(like.nbytes, 1))
            call("cuMemAlloc", ctypes.byref(address), n_bytes)
        storage: Any = torch._C._construct_storage_from_data_pointer(
            address.value, torch.device("cpu"), like.nbytes
        )
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape)

    def write(self, to: Tensor, value: Tensor) -> None:
        """Copy a CPU tensor to this member, on its stream."""
        where = ctypes.c_uint64(to.data_ptr()), ctypes.c_void_p(value.data_ptr())
        with self:
            n_bytes = ctypes.c_size_t(value.nbytes)
            call("cuMemcpyHtoDAsync", *where, n_bytes, ctypes.c_void_p(self.stream))

    def fill(self, to: Tensor, byte: int) -> None:
        """Set each byte of a tensor, on the stream."""
        n_bytes = ctypes.c_size_t(to.nbytes)
        where = ctypes.c_uint64(to.data_ptr()), ctypes.c_ubyte(byte), n_bytes
        with self:
            call("cuMemsetD8Async", *where, ctypes.c_void_p(self.stream))

    def read(self, tensor: Tensor) -> Tensor:
        """Wait for the stream, and copy to the CPU."""
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
        where = ctypes.c_void_p(value.data_ptr()), ctypes.c_uint64(tensor.data_ptr())
        with self:
            stream = ctypes.c_void_p(self.stream)
            n_bytes = ctypes.c_size_t(value.nbytes)
            call("cuMemcpyDtoHAsync", *where, n_bytes, stream)
            call("cuStreamSynchronize", stream)
        return value


class Group:
    """The members, and the memory that a group of them works with."""

    def __init__(self) -> None:
        torch_core.attach()
        self.members = [Member(index) for index in range(N)]
        self.native = _native.DeviceGroup([m.device for m in self.members])
        self.streams = tuple(m.stream for m in self.members)
        self.ring = self.members[0].empty(12 * MIB, dtype=torch.uint8)
        self.rooms = [m.empty(4 * MIB, dtype=torch.uint8) for m in self.members]
        self.rows: list[Tensor] = []  # kept for the last sum, which does not own them

    def here(self, k: int, value: Tensor) -> Tensor:
        """Return a copy of a tensor in a member's memory."""
        tensor = self.members[k].empty(*value.shape, dtype=value.dtype)
        self.members[k].write(tensor, value)
        return tensor

    def broadcast(self, sources: list[Tensor]) -> list[Tensor]:
        """Send a segment of tensors; return its blocks on all members but the first."""
        offsets, n_bytes = [], 0
        for source in sources:
            offsets.append(n_bytes)
            n_bytes += -(-source.nbytes // 256) * 256
        if len(sources) == 1:
            n_bytes = sources[0].nbytes
        blocks = [m.empty(n_bytes, dtype=torch.uint8) for m in self.members[1:]]
        segment: Any = (sources, offsets, n_bytes, [None, *blocks])
        self.native.broadcast(self.streams, self.ring, [segment])
        return blocks

    def sum_of(self, tensor: Tensor) -> _native.GradientSum:
        """Return an object that sums tensors like one of member 1."""
        self.rows = []
        return self.native.gradient_sum(1, [tensor], [0], tensor.nbytes)

    def pack(self, of: _native.GradientSum, k: int, grad: Tensor, row: Tensor) -> None:
        """Have a member pack a gradient into a row."""
        self.rows.append(row)
        assert of.pack(self.streams[k], k, [grad], row) == []

    def add_up(self, of: _native.GradientSum, to: Tensor) -> None:
        """Sum the packed rows; all streams wait for the sum."""
        self.native.fence(self.streams)
        of.begin([*self.rooms], to)
        of.end(self.streams[0])
        self.native.settle(self.streams)


@cache
def group() -> Group:
    return Group()


def copies() -> dict[str, Any]:
    g = group()
    for source, target in itertools.product(range(N), repeat=2):
        for n in (1, 1000, 3 * MIB):
            value = torch.randn(n)
            place = g.members[target].empty(n)
            g.native.copy(g.streams, source, [g.here(source, value)], target, [place])
            assert torch.equal(g.members[target].read(place), value)
    return {"kernels": g.members[1].device.kernels}


def segments() -> None:
    """Small tensors are packed; a large one goes from member to member."""
    g = group()
    for sizes in ([3, 500, 70_000], [1] * 700, [4 * MIB]):
        values = [torch.randn(n) for n in sizes]
        blocks = g.broadcast([g.here(0, value) for value in values])
        for k, block in enumerate(blocks, 1):
            found = g.members[k].read(block).view(torch.float32)
            offset = 0
            for value in values:
                assert torch.equal(found[offset : offset + value.numel()], value)
                offset += -(-value.nbytes // 256) * 64


def sums(dtype: torch.dtype) -> None:
    """Sum rows of the members: small rows, and rows that several members sum."""
    g = group()
    for n in (600, 65_536, MIB // 2):
        rows = [torch.randint(-50, 50, (n,)).to(dtype) for _ in (1, 2)]
        to = g.here(0, torch.full((n,), 7, dtype=dtype))
        of = g.sum_of(g.here(1, rows[0]))
        for k, row in enumerate(rows, 1):
            g.pack(of, k, g.here(k, row), g.here(k, torch.zeros_like(row)))
        g.add_up(of, to)
        found = g.members[0].read(to)
        assert torch.equal(found, rows[0] + rows[1]), f"{n} elements"


def rounds_in_flight() -> dict[str, Any]:
    """Send weights, pack them as gradients, sum; nothing waits until the end.

    Each round sends new numbers in the same memory: a transfer that runs too early or
    too late delivers the numbers of another round.
    """
    g = group()
    draw = random.Random(7)
    n = 50_000
    source = g.members[0].empty(n)  # filled with a byte: all elements are the same
    grads = [m.empty(n) for m in g.members]
    blocks = [m.empty(n) for m in g.members]
    totals = [g.members[0].empty(n) for _ in range(N_ROUNDS)]
    of = g.sum_of(grads[1])
    for number in range(N_ROUNDS):
        g.members[0].fill(source, number % 100)
        for k in (1, 2):
            places = [grads[k]]
            g.native.copy(g.streams, 0, [source], k, places)
        for k in (1, 2) if draw.random() < 0.5 else (2, 1):
            g.pack(of, k, grads[k], blocks[k])
        g.add_up(of, totals[number])
    for number, total in enumerate(totals):
        found = g.members[0].read(total)
        sent = torch.full((4,), number % 100, dtype=torch.uint8).view(torch.float32)
        assert torch.equal(found, 2 * sent.expand(n)), f"round {number}"
    return {"rounds": N_ROUNDS}


def checks() -> Iterator[tuple[str, Any]]:
    yield "copies", copies
    yield "segments", segments
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        yield f"sums of {str(dtype)[6:]}", partial(sums, dtype)
    yield "rounds_in_flight", rounds_in_flight


def run(seconds: float) -> bool:
    del seconds
    return run_here(checks())
