"""Make the native module's objects on simulated CUDA and NCCL: see tests/c/fake.

Tensors are CPU tensors; a `Device` of dlpack_type 1 takes them for its own.  Unless the
fake executes early, it runs enqueued work only at `synchronize()`.
"""

import contextlib
import ctypes
import functools
import gc
import os
from unittest import mock

import torch
from natives import MIB, make_world
from paceline import _native
from paceline._compat import torch_core, torch_cuda
from support import fake_gpus
from torch import nn

SIZES = (MIB, MIB // 4, 1024)
OPTIONS = "protect=0,foreign=1,share_device=1"


@functools.cache
def fake():
    os.environ["XDG_CACHE_HOME"] = fake_gpus.CACHE
    loaded = ctypes.CDLL(fake_gpus.library())
    loaded.fake_error.restype = ctypes.c_char_p
    loaded.fake_bytes_in_use.restype = ctypes.c_int64
    for name in ("fake_reset_text", "fake_count"):
        getattr(loaded, name).argtypes = [ctypes.c_char_p]
    loaded.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    return loaded


def synchronize():
    fake().fake_synchronize_all()


def count(function):
    return fake().fake_count(function.encode())


class Streams:
    """The current stream of this thread, instead of torch's."""

    def __init__(self):
        self.now = self.asked = 0
        self._made, self._graphs = [], []

    def __call__(self, index):
        self.asked += 1
        return self.now

    def new(self):
        made = ctypes.c_void_p()
        if not self._made:
            context = ctypes.c_void_p()
            assert fake().cuInit(0) == 0
            assert fake().cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
            assert fake().cuCtxPushCurrent_v2(context) == 0
        assert fake().cuStreamCreate(ctypes.byref(made), 1) == 0
        self._made.append(made)
        self.now = made.value

    @contextlib.contextmanager
    def captured(self):
        """Capture the current stream's work; yield the list that becomes its graph."""
        graph, executable, made = ctypes.c_void_p(), ctypes.c_void_p(), []
        stream = ctypes.c_void_p(self.now)
        assert fake().cuStreamBeginCapture_v2(stream, 0) == 0
        try:
            yield made
        finally:
            status = fake().cuStreamEndCapture(stream, ctypes.byref(graph))
        assert status == 0
        flags, place = ctypes.c_ulonglong(0), ctypes.byref(executable)
        assert fake().cuGraphInstantiateWithFlags(place, graph, flags) == 0
        made.append(lambda: fake().cuGraphLaunch(executable, stream))
        self._graphs.append((graph, executable))

    def close(self):
        for graph, executable in self._graphs:
            assert fake().cuGraphExecDestroy(executable) == 0
            assert fake().cuGraphDestroy(graph) == 0
        self._graphs.clear()
        self.now = 0
        for made in self._made:
            assert fake().cuStreamDestroy_v2(made) == 0
        if self._made:
            assert fake().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())) == 0
            assert fake().cuDevicePrimaryCtxRelease_v2(0) == 0
        self._made.clear()


@contextlib.contextmanager
def fake_device(options="schedule=early", exchange=True):
    """Yield the current stream; at the end check for left objects and misuses of CUDA.

    The fake replaces NCCL even if a torch with CUDA has loaded the real one.
    """
    if fake().fake_live_objects() > 0:  # left by a test that failed
        gc.collect()
    assert fake().fake_reset_text(f"{options},{OPTIONS}".encode()) != 0
    streams = Streams()
    libnccl = mock.patch.dict(os.environ, PACELINE_LIBNCCL=fake_gpus.library())
    libnccl.start()
    before = torch_cuda.current_stream, torch_cuda.empty, torch_cuda.record_stream
    table = torch.Tensor.__dict__.get("__dlpack_c_exchange_api__")
    torch_cuda.current_stream = streams
    torch_cuda.empty = fake_gpus.empty
    torch_cuda.record_stream = fake_gpus.record_stream
    try:
        if not exchange and table is not None:
            torch.Tensor.__dlpack_c_exchange_api__ = None
        torch_core.attach()
        held = make_device()  # as paceline._gpu holds each
        yield streams
        gc.collect()  # streams outlive the memory that was recorded on them
        del held
        streams.close()
        synchronize()
        errors = [fake().fake_error(i) for i in range(fake().fake_errors())]
        assert not errors
    finally:
        libnccl.stop()
        torch_cuda.current_stream, torch_cuda.empty, torch_cuda.record_stream = before
        if not exchange and table is not None:
            torch.Tensor.__dlpack_c_exchange_api__ = table
        torch_core.attach()


def make_device(index=0, **changes):
    given = {"driver": fake_gpus.library(), "nvrtc": fake_gpus.library()}
    return _native.Device(index, **{**given, "dlpack_type": 1, **changes})


def make_device_world(params, buffers=(), device=None, sparse=(), **changes):
    device = make_device() if device is None else device
    arena_bytes, n_ops, words_bytes = _native.measure(
        params, list(buffers), *SIZES[:2], list(sparse), device
    )
    return make_world(
        arena_bytes=words_bytes,
        n_ops=n_ops,
        device=device,
        device_bytes=max(arena_bytes, MIB) - words_bytes,
        nccl=fake_gpus.library(),
        **changes,
    )


def make_device_reducer(params, buffers=(), sizes=SIZES, sparse=(), **changes):
    world = make_device_world(params, buffers, sparse=sparse, **changes)
    return _native.Reducer(world, params, list(buffers), *sizes, list(sparse))


def parameters(*shapes):
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


def backward(*terms):
    """Give each parameter the gradient paired with it, and wait for the GPU."""
    sum((p * g).sum() for p, g in terms).backward()
    synchronize()
