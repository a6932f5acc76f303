"""Probes of torch for GPUs: what is private, or differs by version."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import Any

import torch


def current_stream(index: int) -> int:
    """Return this thread's current stream on a GPU, as a CUstream.

    Used if torch's tensors have no DLPack exchange table, which also returns it.
    """
    return int(torch._C._cuda_getCurrentRawStream(index))


def is_capturing() -> bool:
    """Tell whether the current stream is capturing a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def generator(index: int) -> torch.Generator:
    """Return the generator of random numbers of a GPU."""
    return torch.cuda.default_generators[index]


def size(index: int) -> tuple[int, int]:
    """Return a GPU's bytes of memory and its number of multiprocessors."""
    properties: Any = torch.cuda.get_device_properties(index)
    return properties.total_memory, properties.multi_processor_count


@torch.inference_mode(False)
def empty(index: int, n_bytes: int) -> torch.Tensor:
    """Return memory of a GPU, from torch's allocator."""
    return torch.empty(n_bytes, dtype=torch.uint8, device=torch.device("cuda", index))


def record_stream(memory: torch.Tensor, stream: int) -> None:
    """Have torch reuse memory only after the work on a CUstream."""
    device = memory.device
    make: Any = torch.cuda.ExternalStream
    of_user = make(stream, device) if stream else torch.cuda.default_stream(device)
    memory.record_stream(of_user)


@torch.inference_mode(False)
def view_of(
    memory: torch.Tensor,
    offset: int,
    dtype: str,
    *dims: int,
) -> torch.Tensor:
    """Return a part of such memory, as a tensor that autograd counts separately."""
    kind, (size, strides) = getattr(torch, dtype), (dims[::2], dims[1::2])
    part = memory[offset : offset + math.prod(size) * kind.itemsize].view(kind)
    return part.as_strided(size, strides).data


def is_rocm() -> bool:
    """Tell whether this torch is built for AMD's ROCm, which it also calls CUDA."""
    return getattr(torch.version, "hip", None) is not None


def build() -> str:
    """Return what torch was built for: "CUDA 13.0", "ROCm 6.2" or "CPU"."""
    if is_rocm():
        return f"ROCm {torch.version.hip}"
    return "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def why_no_cuda() -> str:
    """Return why this process can use no GPU; an empty string if it can."""
    if is_rocm():
        return "this torch is built for ROCm, not for CUDA"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""


def major_of_cuda() -> str:
    """Return the major version of CUDA that torch was built for, such as "13"."""
    return (torch.version.cuda or "").partition(".")[0]


def identity(index: int, counts_parts: bool) -> str:
    """Return text that identifies a GPU on its host; empty if torch has none.

    Parameters
    ----------
    index : int
        torch's index of the device.
    counts_parts : bool
        Whether two parts of one card (MIG) count as two GPUs.  They share the address
        on the PCI bus, but each has a UUID.
    """
    properties: Any = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    has_address = all(hasattr(properties, name) for name in names)
    if uuid is not None and (counts_parts or not has_address):
        return f"GPU {uuid}"
    if not has_address:
        return ""
    domain, bus, device = (int(getattr(properties, name)) for name in names)
    return f"GPU on PCI bus {domain:04x}:{bus:02x}:{device:02x}"


@functools.cache
def library_folders() -> list[Path]:
    """Return the folders where torch looks for the libraries that its wheel needs."""
    folders = [Path(torch.__file__).parent / "lib"]
    for path in sys.path:
        folders += sorted(Path(path).glob("nvidia/*/lib"))
    return folders
