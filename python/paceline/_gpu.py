"""The GPUs that this process sees, and what is needed to use them."""

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
"""The first NCCL that takes parts of one card (MIG) for GPUs of their own."""


class Machine:
    """The GPUs that this process sees.  Tests put a fake into :data:`machine`."""

    device_type = "cuda"

    def index_of(self, device: torch.device) -> int | None:
        """Return the number of the GPU that a device is; None: it is none."""
        return device.index if device.type == self.device_type else None

    def index_of_tensor(self, tensor: torch.Tensor, expected: int) -> int | None:
        """Return the number of the GPU that a tensor is on.

        `expected` is the one that it should be on, for machines that cannot tell.
        """
        return self.index_of(tensor.device)

    def device(self, index: int) -> torch.device:
        """Return a GPU as torch names it."""
        return torch.device(self.device_type, index)

    def current_stream(self, index: int) -> Any:
        """Return the stream that is current on a GPU, as torch has it."""
        return torch.cuda.current_stream(index)

    def on(self, index: int, stream: Any) -> AbstractContextManager[Any]:
        """Return what makes a GPU, and a stream of it, the current ones."""
        return _on(index, stream)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor in memory that GPUs read by themselves."""
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def synchronize(self) -> None:
        """Wait for all that GPUs were given, if any was used."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for index in range(self.count()):
                torch.cuda.synchronize(index)

    def is_capturing(self) -> bool:
        """Tell whether a CUDA graph is captured on the current stream."""
        return torch_cuda.is_capturing()

    def generator_state(self, index: int) -> Any:
        """Return what changes where random numbers are drawn on a GPU."""
        return torch_cuda.generator_state(index)

    def size(self, index: int) -> tuple[int, int]:
        """Return the bytes of a GPU's memory, and how many multiprocessors it has."""
        return torch_cuda.size(index)

    def properties(self, index: int) -> tuple[str, str]:
        """Return a GPU's name, and its compute capability: "9.0"."""
        properties: Any = torch.cuda.get_device_properties(index)
        return properties.name, f"{properties.major}.{properties.minor}"

    def can_access(self, index: int, peer: int) -> bool:
        """Tell whether a GPU can read and write another one's memory by itself."""
        return torch.cuda.can_device_access_peer(index, peer)

    def count(self) -> int:
        """Return how many there are."""
        return torch.cuda.device_count()

    def current(self) -> int:
        """Return the number of the one that torch uses where none is named."""
        return torch.cuda.current_device()

    def why_unusable(self) -> str:
        """Return why none can be used; nothing where they can."""
        return torch_cuda.why_no_cuda()

    def identity(self, index: int, nccl_version: int) -> str:
        """Return what NCCL tells a GPU by from all others of its host.

        Nothing where that is not known.
        """
        return torch_cuda.identity(index, nccl_version >= _PARTS_NCCL)

    def open(self, index: int) -> _native.Device:
        """Return the native side of a GPU."""
        return _native.Device(index, nvrtc=find_library("nvrtc"))

    def nccl_version(self, path: str | None) -> int:
        """Return NCCL's version, as in 22809; see :func:`find_library` for the path."""
        return _native.nccl_version(path)


_threads = threading.local()


@contextlib.contextmanager
def _on(index: int, stream: Any) -> Iterator[None]:
    # stream() alone, on its way out, would make a context on GPU 0.
    with torch.cuda.device(index), torch.cuda.stream(stream):
        if not hasattr(_threads, "has_context"):
            # cuBLAS warns in a thread that has no context; CUDA gives it one here.
            torch.cuda.mem_get_info(index)
            _threads.has_context = True
        yield


machine = Machine()
_opened: dict[tuple[int, int], _native.Device] = {}
tried: dict[tuple[int, int], bool] = {}
"""Pairs of GPUs that exchanged bytes; the second's kernels may read the first's."""


def open_device(index: int) -> _native.Device:
    """Return the native side of a GPU: one a process."""
    key = os.getpid(), index
    if key not in _opened:
        _opened[key] = machine.open(index)
    return _opened[key]


def find_library(name: str) -> str | None:
    """Return the file of one of NVIDIA's libraries, where torch's wheels have it.

    None where the loader is to find it by its name: torch has loaded it already, or it
    belongs to the system.
    """
    pattern = re.compile(rf"lib{name}(-[0-9a-f]+)?\.so\.(\d+)[\d.]*")
    found = []
    for rank, folder in enumerate(torch_cuda.library_folders()):
        for path in sorted(folder.glob(f"lib{name}*.so.*")):
            if match := pattern.fullmatch(path.name):
                # NVRTC's major version is CUDA's; NCCL's has been 2 for ten years.
                is_torchs = match[2] == torch_cuda.major_of_cuda()
                found.append((not is_torchs, rank, str(path)))
    return min(found)[2] if found else None
