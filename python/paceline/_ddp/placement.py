"""Where the ranks train: the device of each module, and the GPU of each rank."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from paceline import _environment, _gpu, _native
from paceline._compat import torch_groups

_SHARED_GPU_NCCL = 23003
"""The first NCCL with NCCL_MULTI_RANK_GPU_ENABLE."""


@dataclass(frozen=True)
class Placement:
    """Where a rank trains, as sent to the other ranks."""

    device: str = "cpu"
    gpu: str = ""  # its identity among the host's GPUs
    nccl_version: int = 0  # as in 22809; 0 if unknown
    nccl_host: str = ""  # NCCL's identity of the host
    shares: bool = False  # NCCL was set to take several ranks on one GPU


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU."""

    index: int  # torch's number
    nccl: str | None = None  # its file, or None if the loader finds it

    @property
    def native(self) -> _native.Device:
        """The native object."""
        return _gpu.open_device(self.index)

    def memory(self, arena_bytes: int, words_bytes: int) -> Any:
        """Return the arguments with which a world has its gradients on this GPU.

        `words_bytes` of the step's memory are on the host.
        """
        return {
            "device": self.native,
            "device_bytes": arena_bytes - words_bytes,
            "nccl": self.nccl,
        }


def type_of(module: Any) -> str:
    """Return the type of the device that holds a module's gradients."""
    parts = module.modules() if hasattr(module, "modules") else ()
    first = next((p for m in parts for _, p in torch_groups.own_parameters(m)), None)
    is_on_gpu = first is not None and _gpu.machine.index_of(first.device) is not None
    return _gpu.machine.device_type if is_on_gpu else "cpu"


def is_gpu(device: torch.device) -> bool:
    """Tell whether a device is a GPU that this package trains on."""
    return _gpu.machine.index_of(device) is not None


def open_gpu(device: torch.device, is_alone: bool) -> tuple[Gpu, Placement]:
    """Return a rank's GPU, ready for use, and the placement to send to others."""
    index = _gpu.machine.index_of(device)
    assert index is not None
    if because := _gpu.machine.why_unusable():
        raise NotImplementedError(
            f"the module is on {device}, and {because}: paceline trains on the CPU and "
            "on NVIDIA GPUs; install a torch that is built for CUDA"
        )
    if is_alone:  # then no driver is needed
        return Gpu(index), Placement(str(device))
    _gpu.open_device(index)
    gpu = Gpu(index, _gpu.find_library("nccl"))
    version = _gpu.machine.nccl_version(gpu.nccl)
    placement = Placement(
        device=str(device),
        gpu=_gpu.machine.identity(index, version),
        nccl_version=version,
        nccl_host=_environment.nccl_host(),
        shares=_environment.nccl_shares_gpus(),
    )
    return gpu, placement


# ---- the constructor's arguments ----------------------------------------------------


def read_devices(
    device_ids: Any, output_device: Any, devices: Iterable[torch.device]
) -> tuple[list[int] | None, int | None]:
    """Return ``device_ids`` and ``output_device`` as torch's wrapper keeps them.

    `devices` are those of the module's parameters.
    """
    try:
        ids = [] if device_ids is None else list(device_ids)
    except TypeError:
        raise TypeError(
            f"device_ids is {device_ids!r}: give a list with one device, as in "
            "device_ids=[0], or None"
        ) from None
    if len(ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    found = sorted(set(devices), key=str)
    index = _gpu.machine.index_of(found[0]) if len(found) == 1 else None
    if not ids or index is None:
        if ids or output_device:
            because = _gpu.machine.why_unusable()
            hint = f"; {because}" if because else ", or move the module to a GPU first"
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only "
                "work with single-device/multiple-device GPU modules or CPU modules, "
                f"but got device_ids {device_ids}, output_device {output_device}, and "
                f"module parameters {[str(device) for device in found]}. Leave both "
                f"out on the CPU{hint}."
            )
        return None, None
    wanted = _index(ids[0], "device_ids")
    if wanted != index:
        raise ValueError(
            f"device_ids is {ids}, but the module's parameters are on {found[0]}: move "
            f"the module first, as in module.to('cuda:{wanted}'), or give "
            f"device_ids=[{index}]"
        )
    if output_device is None:
        return [wanted], wanted
    return [wanted], _index(output_device, "output_device")


def _index(device: Any, name: str) -> int:
    """Return the number of the GPU that `device` means; None means the current one."""
    index = _number(device, name)
    if index is None:
        return _gpu.machine.current()
    if not 0 <= index < _gpu.machine.count():
        raise ValueError(
            f"{name} is or has {device!r}, and this process sees "
            f"{_gpu.machine.count()} CUDA devices, numbered from 0: give one of those "
            "(devices that CUDA_VISIBLE_DEVICES hides have no number)"
        )
    return index


def _number(device: Any, name: str) -> int | None:
    if device is None:
        return None
    with suppress(TypeError):
        return operator.index(device)
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"{name} is or has {device!r}, no device: {error}") from None
    if found.type == "cpu":
        raise ValueError(f"Expected a non cpu device, but got: {device} in {name}")
    number: int | None = found.index
    return number


# ---- agreement ----------------------------------------------------------------------


def raise_conflict(placements: Sequence[Placement]) -> None:
    """Raise if the ranks, given in order, cannot train together on their devices."""
    first = placements[0]
    for rank, placement in enumerate(placements):
        kinds = [each.device.partition(":")[0] for each in (first, placement)]
        if kinds[0] != kinds[1]:
            raise _native.MismatchError(
                f"rank 0's module is on {first.device}, rank {rank}'s on "
                f"{placement.device}: move all to the CPU, or each to its own GPU"
            )
        if placement.nccl_version != first.nccl_version:
            raise _native.MismatchError(
                f"rank 0 has NCCL {_version_text(first.nccl_version)}, rank {rank} has "
                f"{_version_text(placement.nccl_version)}: install the same torch for "
                "every rank"
            )
    taken: dict[tuple[str, str], int] = {}
    for rank, placement in enumerate(placements):
        shares = placement.shares and placement.nccl_version >= _SHARED_GPU_NCCL
        if shares or not placement.gpu:
            continue
        other = taken.setdefault((placement.nccl_host, placement.gpu), rank)
        if other != rank:
            raise ValueError(
                f"Duplicate GPU detected: ranks {other} and {rank} are both on "
                f"{placement.gpu} ({placements[other].device} and {placement.device}), "
                "and NCCL takes one rank a GPU. Give each its own, as in "
                "torch.cuda.set_device(local_rank), or start fewer ranks; to try "
                "several ranks on one GPU, give each another NCCL_HOSTID"
            )


def _version_text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
