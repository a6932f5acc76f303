"""GPUs: which one a module is on, who is on which, and what is needed to use it."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from paceline import _environment, _native, _torch_cuda

_SHARED_GPU_NCCL = 23003
"""The first NCCL that knows NCCL_MULTI_RANK_GPU_ENABLE."""


class Machine:
    """The GPUs that this process sees.  Tests put a fake into :data:`machine`."""

    device_type = "cuda"

    def index_of(self, device: torch.device) -> int | None:
        """Return the number of the GPU that a device is; None: it is none."""
        return device.index if device.type == self.device_type else None

    def count(self) -> int:
        """Return how many there are."""
        return torch.cuda.device_count()

    def current(self) -> int:
        """Return the number of the one that torch uses where none is named."""
        return torch.cuda.current_device()

    def why_unusable(self) -> str:
        """Return why none can be used; nothing where they can."""
        return _torch_cuda.why_no_cuda()

    def identity(self, index: int) -> str:
        """Return what tells a GPU from all others of its host; nothing: not known."""
        return _torch_cuda.identity(index)

    def open(self, index: int) -> _native.Device:
        """Return the native side of a GPU."""
        return _native.Device(index, nvrtc=find_library("nvrtc"))

    def nccl_version(self, path: str | None) -> int:
        """Return NCCL's version, as in 22809; see :func:`find_library` for the path.

        Raises
        ------
        NotImplementedError
            If there is none, or it is too old.
        """
        return _native.nccl_version(path)


machine = Machine()
_opened: dict[tuple[int, int], _native.Device] = {}


def open_device(index: int) -> _native.Device:
    """Return the native side of a GPU: one a process."""
    key = os.getpid(), index
    if key not in _opened:
        _opened[key] = machine.open(index)
    return _opened[key]


def find_library(name: str) -> str | None:
    """Return the file of one of NVIDIA's libraries, where torch's wheels have it.

    Parameters
    ----------
    name : {"nccl", "nvrtc"}
        The library.

    Returns
    -------
    str or None
        None where the loader is to find it by its name: torch has loaded it already, or
        it belongs to the system.
    """
    pattern = re.compile(rf"lib{name}(-[0-9a-f]+)?\.so\.(\d+)[\d.]*")
    found = []
    for rank, folder in enumerate(_torch_cuda.library_folders()):
        for path in sorted(folder.glob(f"lib{name}*.so.*")):
            if match := pattern.fullmatch(path.name):
                # NVRTC's major version is CUDA's; NCCL's has been 2 for ten years.
                is_torchs = match[2] == _torch_cuda.major_of_cuda()
                found.append((not is_torchs, rank, str(path)))
    return min(found)[2] if found else None


@dataclass(frozen=True)
class Seat:
    """Where a rank trains, as the ranks tell each other.

    Attributes
    ----------
    device : str
        Its device: ``"cuda:0"``, say.
    gpu : str
        What tells the GPU from others of the host; nothing on the CPU.
    nccl_version : int
        As in 22809; 0 on the CPU, or where it is not known.
    nccl_host : str
        What NCCL tells hosts apart by.
    shares : bool
        Whether NCCL was told to take several ranks on one GPU.
    """

    device: str = "cpu"
    gpu: str = ""
    nccl_version: int = 0
    nccl_host: str = ""
    shares: bool = False


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU.

    Attributes
    ----------
    index : int
        As torch counts.
    nccl : str or None
        The file of NCCL, where the loader is not to find it by itself.
    """

    index: int
    nccl: str | None = None

    @property
    def native(self) -> _native.Device:
        """Its native side."""
        return open_device(self.index)

    def memory(self, arena_bytes: int, words_bytes: int, in_fp32: bool) -> Any:
        """Return what a world is to be given to have its gradients on this GPU.

        Parameters
        ----------
        arena_bytes : int
            Of all memory of a step, host's and GPU's.
        words_bytes : int
            What of it is the host's.
        in_fp32 : bool
            Whether 16-bit gradients are added up in float32.
        """
        return {
            "device": self.native,
            "device_bytes": arena_bytes - words_bytes,
            "nccl": self.nccl,
            "accumulate": "float32" if in_fp32 else "nccl",
        }


def type_of(module: Any) -> str:
    """Return the type of device whose tensors a module has gradients of."""
    first = next(module.parameters(), None) if hasattr(module, "parameters") else None
    is_on_gpu = first is not None and machine.index_of(first.device) is not None
    return machine.device_type if is_on_gpu else "cpu"


def is_gpu(device: torch.device) -> bool:
    """Tell whether a device is a GPU that this package trains on."""
    return machine.index_of(device) is not None


def open_gpu(device: torch.device, is_alone: bool) -> tuple[Gpu, Seat]:
    """Return a rank's GPU, ready for use, and what to tell the others of it.

    Raises
    ------
    NotImplementedError
        If torch, the driver or NCCL cannot be used; it says which, and what to do.
    """
    index = machine.index_of(device)
    assert index is not None
    if because := machine.why_unusable():
        raise NotImplementedError(
            f"the module is on {device}, and {because}: paceline trains on the CPU and "
            "on NVIDIA's GPUs; install a torch that is built for CUDA"
        )
    if is_alone:  # it may do without the driver
        return Gpu(index), Seat(str(device))
    open_device(index)
    gpu = Gpu(index, find_library("nccl"))
    seat = Seat(
        device=str(device),
        gpu=machine.identity(index),
        nccl_version=machine.nccl_version(gpu.nccl),
        nccl_host=_environment.nccl_host(),
        shares=_environment.nccl_shares_gpus(),
    )
    return gpu, seat


# ---- the constructor's arguments ----------------------------------------------------


def read_devices(
    device_ids: Any, output_device: Any, devices: Iterable[torch.device]
) -> tuple[list[int] | None, int | None]:
    """Return ``device_ids`` and ``output_device`` as torch's wrapper keeps them.

    Parameters
    ----------
    device_ids, output_device
        As given.
    devices : iterable of torch.device
        Those of the module's parameters.

    Raises
    ------
    TypeError
        If ``device_ids`` is no list.
    ValueError
        If there are several, the module is elsewhere, or there is no such device.
    """
    ids = _as_list(device_ids)
    found = sorted(set(devices), key=str)
    index = machine.index_of(found[0]) if len(found) == 1 else None
    if not ids or index is None:
        if ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only "
                "work with single-device/multiple-device GPU modules or CPU modules, "
                f"but got device_ids {device_ids}, output_device {output_device}, and "
                f"module parameters {[str(device) for device in found]}. Leave both "
                f"out on the CPU{_hint()}."
            )
        return None, None
    given = _index(ids[0], "device_ids")
    if given != index:
        raise ValueError(
            f"device_ids is {ids}, but the module's parameters are on {found[0]}: move "
            f"the module first, as in module.to('cuda:{given}'), or give "
            f"device_ids=[{index}]"
        )
    if output_device is None:
        return [given], given
    return [given], _index(output_device, "output_device")


def _hint() -> str:
    because = machine.why_unusable()
    return f"; {because}" if because else ", or move the module to a GPU first"


def _as_list(device_ids: Any) -> list[Any]:
    if device_ids is None:
        return []
    try:
        ids = list(device_ids)
    except TypeError:
        raise TypeError(
            f"device_ids is {device_ids!r}: give a list with one device, as in "
            "device_ids=[0], or None"
        ) from None
    if len(ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    return ids


def _index(given: Any, name: str) -> int:
    """Return the number of the GPU that is meant; None means torch's current one."""
    index = _number(given, name)
    if index is None:
        return machine.current()
    if not 0 <= index < machine.count():
        raise ValueError(
            f"{name} is or has {given!r}, and this process sees {machine.count()} CUDA "
            "devices, numbered from 0: give one of those (what CUDA_VISIBLE_DEVICES "
            "hides has no number)"
        )
    return index


def _number(given: Any, name: str) -> int | None:
    if given is None:
        return None
    with suppress(TypeError):
        return operator.index(given)
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"{name} is or has {given!r}, no device: {error}") from None
    if device.type == "cpu":
        raise ValueError(f"Expected a non cpu device, but got: {given} in {name}")
    number: int | None = device.index
    return number


# ---- agreement ----------------------------------------------------------------------


def raise_conflict(seats: Sequence[Seat]) -> None:
    """Raise where ranks cannot train together from where they are.

    Parameters
    ----------
    seats : sequence of Seat
        Every rank's, by rank.

    Raises
    ------
    paceline.MismatchError
        If the types of devices, or the versions of NCCL, differ.
    ValueError
        If two ranks are on one GPU.
    """
    first = seats[0]
    for rank, seat in enumerate(seats):
        kinds = [each.device.partition(":")[0] for each in (first, seat)]
        if kinds[0] != kinds[1]:
            raise _native.MismatchError(
                f"rank 0's module is on {first.device}, rank {rank}'s on "
                f"{seat.device}: move all to the CPU, or each to a GPU of its own"
            )
        if seat.nccl_version != first.nccl_version:
            raise _native.MismatchError(
                f"rank 0 has NCCL {_in_words(first.nccl_version)}, rank {rank} has "
                f"{_in_words(seat.nccl_version)}: install the same torch for every rank"
            )
    taken: dict[tuple[str, str], int] = {}
    for rank, seat in enumerate(seats):
        if not seat.gpu or (seat.shares and seat.nccl_version >= _SHARED_GPU_NCCL):
            continue
        other = taken.setdefault((seat.nccl_host, seat.gpu), rank)
        if other != rank:
            raise ValueError(
                f"Duplicate GPU detected: ranks {other} and {rank} are both on "
                f"{seat.gpu} ({seats[other].device} and {seat.device}), and NCCL takes "
                "one rank a GPU. Give each its own, as in "
                "torch.cuda.set_device(local_rank), or start fewer ranks; to try "
                "several ranks on one GPU, give each another NCCL_HOSTID"
            )


def _in_words(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
