"""The GPUs that this process sees, their native sides, and NVIDIA's libraries."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from paceline import _native
from paceline._compat import torch_cuda

_PARTS_NCCL = 23000
"""The first NCCL that handles each part of a partitioned card (MIG) as a GPU."""


class Machine:
    """The GPUs that this process sees.  Tests put a fake into :data:`machine`."""

    device_type = "cuda"

    def index_of(self, device: torch.device) -> int | None:
        """Return a device's number; None if it is not a GPU."""
        return device.index if device.type == self.device_type else None

    def index_of_tensor(self, tensor: torch.Tensor, expected: int) -> int | None:
        """Return the number of the GPU that holds a tensor; None if it is not on one.

        Machines with all tensors on the CPU return `expected`, where it should be.
        """
        return self.index_of(tensor.device)

    def device(self, index: int) -> torch.device:
        """Return the torch device of a GPU."""
        return torch.device(self.device_type, index)

    def current_stream(self, index: int) -> Any:
        """Return torch's current stream on a GPU."""
        return torch.cuda.current_stream(index)

    def on(self, index: int, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that makes a GPU and one of its streams current."""
        return _on(index, stream)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor in pinned memory, copied if necessary."""
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def synchronize(self) -> None:
        """Wait until all GPUs are idle, if any was used."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for index in range(self.count()):
                torch.cuda.synchronize(index)

    def is_capturing(self) -> bool:
        """Tell whether the current stream is capturing a CUDA graph."""
        return torch_cuda.is_capturing()

    def generator(self, index: int) -> torch.Generator:
        """Return the generator of random numbers of a GPU."""
        return torch_cuda.generator(index)

    def size(self, index: int) -> tuple[int, int]:
        """Return a GPU's memory in bytes and its number of multiprocessors."""
        return torch_cuda.size(index)

    def properties(self, index: int) -> tuple[str, str]:
        """Return a GPU's name and its compute capability, such as "9.0"."""
        properties: Any = torch.cuda.get_device_properties(index)
        return properties.name, f"{properties.major}.{properties.minor}"

    def can_access(self, index: int, peer: int) -> bool:
        """Tell whether a GPU can read and write the memory of its peer directly."""
        return torch.cuda.can_device_access_peer(index, peer)

    def count(self) -> int:
        """Return the number of GPUs."""
        return torch.cuda.device_count()

    def current(self) -> int:
        """Return the number of torch's current GPU."""
        return torch.cuda.current_device()

    def why_unusable(self) -> str:
        """Return why no GPU can be used; "" if they can."""
        return torch_cuda.why_no_cuda()

    def identity(self, index: int, nccl_version: int) -> str:
        """Return what NCCL identifies a GPU by among those of its host.

        Return "" if it is not known.
        """
        return torch_cuda.identity(index, nccl_version >= _PARTS_NCCL)

    def open(self, index: int) -> _native.Device:
        """Make the native side of a GPU."""
        return _native.Device(index, nvrtc=find_library("nvrtc"))

    def nccl_version(self, path: str | None) -> int:
        """Return NCCL's version, such as 22809, of the library at a path."""
        return _native.nccl_version(path)


_threads = threading.local()


@contextlib.contextmanager
def _on(index: int, stream: Any) -> Iterator[None]:
    # Without device(), the exit of stream() would create a context on GPU 0.
    with torch.cuda.device(index), torch.cuda.stream(stream):
        if not hasattr(_threads, "has_context"):
            # cuBLAS warns in a thread without a CUDA context; this call creates one.
            torch.cuda.mem_get_info(index)
            _threads.has_context = True
        yield


machine = Machine()
_opened: dict[tuple[int, int], _native.Device] = {}
tried: dict[tuple[int, int], bool] = {}
"""Pairs of GPUs that exchanged bytes; False if a kernel read wrong bytes of a peer."""


def open_device(index: int) -> _native.Device:
    """Return the native side of a GPU; each process makes one per GPU."""
    key = os.getpid(), index
    if key not in _opened:
        _opened[key] = machine.open(index)
    return _opened[key]


def find_library(name: str) -> str | None:
    """Return the path of an NVIDIA library in the wheels of torch.

    None if it is not there.  Then the loader finds it by name: torch has loaded it
    already, or the system has it.
    """
    pattern = re.compile(rf"lib{name}(-[0-9a-f]+)?\.so\.(\d+)[\d.]*")
    found = []
    for rank, folder in enumerate(torch_cuda.library_folders()):
        for path in sorted(folder.glob(f"lib{name}*.so.*")):
            if match := pattern.fullmatch(path.name):
                # NVRTC has the major version of CUDA; NCCL has had 2 for ten years.
                is_torchs = match[2] == torch_cuda.major_of_cuda()
                found.append((not is_torchs, rank, str(path)))
    return min(found)[2] if found else None
