"""The devices of replicas, as the user names them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline import _environment, _gpu
from paceline._compat import torch_core

CPU = torch.device("cpu")


class Devices(NamedTuple):
    """The devices of replicas and of outputs.

    Attributes
    ----------
    ids : list of torch.device or list of int
        One per replica: the CPU, or numbers of GPUs, as in torch.  Replicas on the CPU
        that stand in for GPUs have the numbers, too.  Empty: no replicas.
    because : str
        Why there is only one replica, if so.
    output : torch.device or int
        The CPU, or the number of a GPU; -1 is the CPU, as in torch.
    source : torch.device
        Where the module is.
    are_gpus : bool
    """

    ids: list[Any]
    because: str
    output: Any = CPU
    source: torch.device = CPU
    are_gpus: bool = False


def read(device_ids: Sequence[Any] | None, output_device: Any) -> Devices:
    """Return the devices for a wrapper's device_ids and output_device."""
    if device_ids is None:
        return _default(output_device)
    if isinstance(device_ids, (str, bytes, int, torch.device)):
        raise TypeError(
            f"device_ids is {device_ids!r}: give a list with one device per replica"
        )
    devices = [_device(each) for each in device_ids]
    if not devices and stand_in():  # range(torch.cuda.device_count())
        return _default(output_device)
    given = f"device_ids is {list(device_ids)!r}"
    because = f"one replica: {given}"
    n_cpu = devices.count(CPU)
    if n_cpu == len(devices):
        if devices and output_device is not None and _output(output_device) != CPU:
            raise ValueError(
                f"output_device is {output_device!r}: outputs of replicas on the CPU "
                "stay on the CPU; leave it out"
            )
        return Devices(devices, because)
    if n_cpu:
        raise ValueError(f"{given}: give the CPU only, or GPUs only")
    if stand_in():
        return Devices([device.index or 0 for device in devices], because)
    machine = _gpu.machine
    why = machine.why_unusable()
    if machine.count() > 0 or torch_core.has_accelerator():
        if why:
            raise NotImplementedError(f"{given}, and {why}; give ['cpu'] * n")
        indices = [_index(each, "device_ids", device_ids) for each in devices]
        return _on_gpus(indices, because, output_device)
    warnings.warn(
        f"{given}, and there is no GPU: the module is called plainly. Set "
        f"{_environment.CPU_REPLICAS}=2 in the environment to put these replicas on "
        "the CPU",
        stacklevel=3,
    )
    return Devices([], f"{because}, and there is no GPU")


def has_gpus() -> bool:
    """Tell whether replicas can be on GPUs here."""
    return _gpu.machine.count() > 0 and not _gpu.machine.why_unusable()


def stand_in() -> bool:
    """Tell whether replicas on the CPU stand in for GPUs."""
    return not has_gpus() and _environment.cpu_replicas() is not None


def _on_gpus(indices: list[int], because: str, output_device: Any) -> Devices:
    """Return these GPUs, and the devices of the outputs and of the module."""
    output = indices[0]
    if output_device is not None:
        device = _output(output_device)
        output = -1 if device == CPU else _index(device, "output_device", output_device)
    return Devices(indices, because, output, _gpu.machine.device(indices[0]), True)


def _output(output_device: Any) -> torch.device:
    return CPU if output_device == -1 else _device(output_device)


def output_of(output_device: Any, are_gpus: bool) -> torch.device:
    """Return the device of a wrapper's outputs, if replicas are on GPUs or not."""
    if not are_gpus or output_device == -1:
        return CPU
    if isinstance(output_device, int):
        return _gpu.machine.device(output_device)
    return torch.device(output_device)


def _default(output_device: Any) -> Devices:
    if has_gpus():
        indices = list(range(_gpu.machine.count()))
        return _on_gpus(indices, "one replica: there is one GPU", output_device)
    n_replicas = _environment.cpu_replicas()
    if n_replicas is not None:
        because = f"one replica: {_environment.CPU_REPLICAS} is {n_replicas}"
        return Devices(list(range(n_replicas)) if n_replicas > 1 else [], because)
    why = _gpu.machine.why_unusable() or "there is no GPU"
    return Devices(
        [],
        f"one replica: device_ids is None, and {why}; for n replicas on the CPU, pass "
        f"device_ids=['cpu'] * n, or set {_environment.CPU_REPLICAS}=n in the "
        "environment",
    )


def _index(device: torch.device, name: str, given: Any) -> int:
    machine = _gpu.machine
    if device.type != "cuda":
        raise NotImplementedError(
            f"{name} is {given!r}: this version of paceline runs replicas on CUDA GPUs "
            "and on the CPU"
        )
    index = machine.current() if device.index is None else device.index
    if not 0 <= index < machine.count():
        raise ValueError(
            f"{name} is {given!r}, and this process sees {machine.count()} CUDA "
            "devices, counted from 0"
        )
    return index


def _device(device_id: Any) -> torch.device:
    """Return the device for a device id; a number names a GPU."""
    try:
        if isinstance(device_id, int) and not isinstance(device_id, bool):
            return torch.device("cuda", device_id)
        device = torch.device(device_id)
    except (RuntimeError, TypeError) as error:
        words = f"{device_id!r} is not a device such as 'cpu' or 'cuda:0': {error}"
        raise TypeError(words) from None
    return CPU if device.type == "cpu" else device


def refuse_gpu(module: torch.nn.Module, because: str) -> None:
    """Raise if a module is on a GPU and its replicas are not."""
    for name, parameter in module.named_parameters():
        if parameter.device.type not in ("cpu", "meta"):
            raise NotImplementedError(
                f"'{name}' is on device {parameter.device}, but the wrapper's replicas "
                f"are on the CPU ({because}): move the module by .cpu(), or pass "
                "device_ids that begin with its GPU"
            )


def warn_of_imbalance(indices: Sequence[int]) -> None:
    """Warn if one GPU has much less memory, or fewer processors, than another."""
    memories, processors = zip(*map(_gpu.machine.size, indices), strict=True)
    for what, values in (("memory", memories), ("multiprocessors", processors)):
        if min(values) < 0.75 * max(values):
            least = indices[values.index(min(values))]
            most = indices[values.index(max(values))]
            warnings.warn(
                f"There is an imbalance between your GPUs: GPU {least} has less than "
                f"75% of the {what} of GPU {most}, and every replica gets the same "
                "number of rows. You may want to exclude it by device_ids or "
                "CUDA_VISIBLE_DEVICES",
                stacklevel=3,
            )
