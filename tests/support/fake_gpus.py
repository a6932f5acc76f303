"""Fake GPUs on a machine without any: for real training scripts and any rank count.

    environment()        in the test: variables with which a rank finds the fake library
    stand_in(rank)       in the rank: modules on the CPU now count as on a GPU
    synchronize()        waits as `torch.cuda.synchronize()` does for a real GPU
    several(n)           in the test: n GPUs of this process, for DataParallel

With one GPU per rank, tensors stay CPU tensors.  With several GPUs, they are on torch
devices (`support/devices`) in host memory.  The native module takes both for GPU
tensors (a `Device` with another `dlpack_type`).  So all that it does with gradients
goes through the fake libcuda and libnccl (`tests/c/fake`): streams, events, kernels,
collectives between processes.

torch's own work on its stream runs at once, and memory that torch frees is reused at
once.  So the host waits for Paceline's work on that stream, as with
`CUDA_LAUNCH_BLOCKING`.  Work on other streams, such as communication, runs as late as
possible, or at random times with `FAKE_SEED=7` in the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paceline import _gpu, _native
from paceline._compat import torch_core, torch_cuda
from paceline._dp import segments
from paceline._dp.gradients import Gradients
from paceline._dp.group import Group

from support import devices
from support.waiting import once_collected

_ROOT = Path(__file__).resolve().parents[2]
_LIBRARY = "build/c/plain/libplfake.so"
CACHE = str(_ROOT / "build/c/cache")
"""The folder for programs that the fake NVRTC compiles, apart from the user's cache."""


@functools.cache
def library() -> str:
    """Return the path of the fake library; build it if necessary."""
    compiler = os.environ.get("CC", "gcc")
    if shutil.which("make") is None or shutil.which(compiler) is None:
        pytest.skip(f"the fake of CUDA needs make and {compiler}")
    made = subprocess.run(
        ["make", "-s", "BUILD=build", _LIBRARY],
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return str(_ROOT / _LIBRARY)


def environment(**options: Any) -> dict[str, str]:
    """Return the variables that a rank needs; for options see fake.h."""
    path = library()
    given = {
        "blocking": 1,  # torch's stream
        "protect": 0,  # torch itself reads and writes this memory
        "foreign": 1,
        "share_device": 1,
        "lazy_connect": 1,
        **_schedule(),
        **options,
    }
    words = ",".join(f"{name}={value}" for name, value in given.items())
    return {
        "PACELINE_LIBCUDA": path,
        "PACELINE_LIBNCCL": path,
        "FAKE_CUDA": words,
        "XDG_CACHE_HOME": CACHE,
    }


def _schedule() -> dict[str, Any]:
    """Return the options for when work runs: as late as possible, or at random."""
    seed = os.environ.get("FAKE_SEED")
    if seed is None:
        return {"schedule": "late", "pump": 0}
    return {"schedule": "random", "pump": 1, "seed": int(seed)}


@functools.cache
def fake() -> ctypes.CDLL:
    """Return this process's fake library, with the functions that control it."""
    loaded = ctypes.CDLL(os.environ.get("PACELINE_LIBCUDA") or library())
    loaded.fake_error.restype = ctypes.c_char_p
    return loaded


def synchronize() -> None:
    fake().fake_synchronize_all()


class _Block:
    """Memory of torch's allocator as the fake has it: host memory, for a CPU tensor."""

    def __init__(self, loaded: ctypes.CDLL, index: int, n_bytes: int) -> None:
        self.loaded, self.pid = loaded, os.getpid()
        loaded.fake_torch_alloc.restype = ctypes.c_void_p
        self.address = loaded.fake_torch_alloc(index, ctypes.c_size_t(n_bytes))
        if self.address is None:
            raise torch.cuda.OutOfMemoryError(f"device {index} is out of memory")
        data = {"data": (self.address, False), "shape": (n_bytes,), "typestr": "|u1"}
        self.__array_interface__ = {**data, "version": 3}

    def __del__(self) -> None:
        if self.address is not None and self.pid == os.getpid():
            self.loaded.fake_torch_free(ctypes.c_void_p(self.address))


def empty(index: int, n_bytes: int) -> torch.Tensor:
    """Stand in for torch_cuda.empty()."""
    return torch.from_numpy(np.asarray(_Block(fake(), index, n_bytes)))


def record_stream(memory: torch.Tensor, stream: int) -> None:
    """Stand in for torch_cuda.record_stream()."""
    address = ctypes.c_void_p(memory.data_ptr())
    fake().fake_torch_record(address, ctypes.c_void_p(stream))


def errors() -> list[str]:
    """Return and clear the misuses of CUDA that the fake has found."""
    found = [fake().fake_error(i).decode() for i in range(fake().fake_errors())]
    fake().fake_forget_errors()
    return found


class Machine(_gpu.Machine):
    """One GPU per rank, which holds all modules.

    Attributes
    ----------
    is_there : bool
        If False, modules count as on the CPU.
    """

    device_type = "cpu"
    is_there = True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def index_of(self, device: torch.device) -> int | None:
        return 0 if self.is_there and device.type == "cpu" else None

    def count(self) -> int:
        return 1

    def current(self) -> int:
        return 0

    def why_unusable(self) -> str:
        return ""

    def identity(self, index: int, nccl_version: int) -> str:
        return f"GPU {self.rank}"

    def open(self, index: int) -> _native.Device:
        return _native.Device(
            index, nvrtc=os.environ["PACELINE_LIBCUDA"], dlpack_type=1
        )


def stand_in(rank: int) -> Machine:
    """From now on, have this process's modules count as on its own GPU."""
    if not isinstance(_gpu.machine, Machine):
        _gpu.machine = Machine(rank)
        torch_cuda.current_stream = lambda index: 0
        torch_cuda.empty, torch_cuda.record_stream = empty, record_stream
    _gpu.machine.is_there = True
    return _gpu.machine


class SeveralGpus(_gpu.Machine):
    """GPUs of one process, as torch devices of support/devices."""

    device_type = devices.KIND

    def __init__(self, n_gpus: int, *, has_peers: bool = True) -> None:
        self.n_gpus, self.has_peers = n_gpus, has_peers

    def current_stream(self, index: int) -> int:
        return devices.native.library.devices_stream(index)

    @contextlib.contextmanager
    def on(self, index: int, stream: int) -> Iterator[None]:
        library = devices.native.library
        before = library.devices_current(), library.devices_stream(index)
        library.devices_set_current(index)
        library.devices_set_stream(index, stream)
        try:
            yield
        finally:
            library.devices_set_stream(index, before[1])
            library.devices_set_current(before[0])

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        ctypes.CDLL(library()).fake_synchronize_all()

    def generator(self, index: int) -> torch.Generator:
        return devices.native.generators[index]

    def size(self, index: int) -> tuple[int, int]:
        return 1 << 30, 1

    def properties(self, index: int) -> tuple[str, str]:
        return "fake GPU", "9.0"

    def can_access(self, index: int, peer: int) -> bool:
        return self.has_peers

    def count(self) -> int:
        return self.n_gpus

    def current(self) -> int:
        return devices.native.library.devices_current()

    def why_unusable(self) -> str:
        return ""

    def open(self, index: int) -> _native.Device:
        path = library()
        return _native.Device(index, driver=path, nvrtc=path, dlpack_type=12)


class OwnGpu(SeveralGpus):
    """The one GPU of a rank, as a torch device of support/devices."""

    def __init__(self, rank: int) -> None:
        super().__init__(1)
        self.rank = rank

    def identity(self, index: int, nccl_version: int) -> str:
        return f"GPU {self.rank}"

    def empty(self, index: int, n_bytes: int) -> torch.Tensor:
        _Block(fake(), index, n_bytes)  # raises if there is no room
        device = torch.device(self.device_type, index)
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)

    def record_stream(self, memory: torch.Tensor, stream: int) -> None:
        devices.native.library.devices_record(memory.data_ptr(), stream)


def show_own(rank: int) -> None:
    """Have this process use the GPU of its rank, as `torch.device("gpu")`."""
    devices.load()
    devices.show(1)
    _gpu.machine = machine = OwnGpu(rank)
    torch_cuda.current_stream, torch_cuda.empty = machine.current_stream, machine.empty
    torch_cuda.record_stream = machine.record_stream
    watch(fake())
    torch_core.attach()


def watch(loaded: ctypes.CDLL | None) -> None:
    """Have the fake check the order of all uses of devices' memory; None: of none."""
    told = loaded and ctypes.cast(loaded.fake_allocated, ctypes.c_void_p)
    asked = loaded and ctypes.cast(loaded.fake_freed, ctypes.c_void_p)
    devices.native.library.devices_watch(told, asked)


_PLAIN = "protect=0,foreign=1,blocking=1,peers=1,devices=10,schedule=late"


@contextlib.contextmanager
def several(n_gpus: int, *options: str) -> Iterator[SeveralGpus]:
    """Provide `n_gpus` GPUs within this context; fail if the fake found a misuse.

    They are `torch.device("gpu", i)`; call devices.load() before.  torch's own work on
    a device's stream runs at once, so the host waits for work on it; work on other
    streams runs as late as possible.  Devices compare models of any size.  `options`
    are those of the fake, such as "peers=0".
    """
    devices.show(n_gpus)
    try:
        loaded = _reset(*options)
        before = _gpu.machine, torch_cuda.current_stream, dict(_gpu._opened)
        has_peers = "peers=0" not in options
        _gpu.machine = machine = SeveralGpus(n_gpus, has_peers=has_peers)
        torch_cuda.current_stream = lambda index: machine.current_stream(index)
        torch_core.attach()
        compared, segments.COMPARED_BYTES = segments.COMPARED_BYTES, 0
        watch(loaded)
        try:
            yield machine
            loaded.fake_synchronize_all()
            found = [loaded.fake_error(i).decode() for i in range(loaded.fake_errors())]
            assert not found, found
        finally:
            segments.COMPARED_BYTES = compared
            _let_go(loaded)
            watch(None)
            _gpu.machine, torch_cuda.current_stream, opened = before
            _gpu._opened.update(opened)
            torch_core.attach()
    finally:
        devices.show(0)


def _reset(*options: str) -> ctypes.CDLL:
    os.environ["XDG_CACHE_HOME"] = CACHE
    loaded = ctypes.CDLL(library())
    loaded.fake_error.restype = ctypes.c_char_p
    if loaded.fake_live_objects() > 0:
        gc.collect()
    seed = os.environ.get("FAKE_SEED")
    drawn = [] if seed is None else ["schedule=random", "pump=1", f"seed={seed}"]
    text = ",".join([_PLAIN, *drawn, *options])
    assert loaded.fake_reset_text(text.encode()) != 0
    return loaded


def _let_go(loaded: ctypes.CDLL) -> None:
    """Release the devices: the next test makes new ones.

    After a backward that failed, torch keeps its graph if it contains Functions.
    """
    _gpu._opened.clear()
    _gpu.tried.clear()

    def is_empty() -> bool:
        return bool(loaded.fake_live_objects() == 0)

    if not once_collected(is_empty):
        for thing in gc.get_objects():
            if type(thing) is Group:
                thing.settle()
                thing.native = None
            elif type(thing) is Gradients:
                thing._backwards.clear()
            elif type(thing) is segments.Segment:
                thing.sums.clear()
        del thing
    assert once_collected(is_empty), "the test left objects of CUDA"


@contextlib.contextmanager
def on_gpu(rank: int) -> Iterator[Machine]:
    """Have modules count as on a GPU here; fail if the fake found a misuse."""
    machine = stand_in(rank)
    try:
        yield machine
    finally:
        synchronize()
        machine.is_there = False
        found = errors()
        assert not found, found
