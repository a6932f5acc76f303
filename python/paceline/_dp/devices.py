"""The devices of replicas, as they were asked for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline import _environment, _gpu
from paceline._compat import torch_core

CPU = torch.device("cpu")


class Devices(NamedTuple):
    """Where replicas, and the outputs, are.

    Attributes
    ----------
    ids : list of torch.device or list of int
        One a replica: the CPU, or numbers of GPUs, as in torch; none: no replicas.
    output : torch.device or int
        The CPU, or the number of a GPU, as in torch: -1 is the CPU there.
    source : torch.device
        Where the module is.
    are_gpus : bool
    because : str
        Why there is only one replica, if so.
    """

    ids: list[Any]
    output: Any
    source: torch.device
    are_gpus: bool
    because: str


def read(device_ids: Sequence[Any] | None, output_device: Any) -> Devices:
    """Return what is meant; device_ids and output_device are those of a wrapper."""
    if device_ids is None:
        return _placed(*_default(), None, output_device)
    devices = _read_all(device_ids)
    because = f"one replica: device_ids is {list(device_ids)!r}"
    n_cpu = devices.count(CPU)
    if n_cpu == len(devices):
        return _placed(devices, because, device_ids, output_device)
    if n_cpu:
        raise ValueError(
            f"device_ids is {list(device_ids)!r}: give the CPU only, or GPUs only"
        )
    machine = _gpu.machine
    why = machine.why_unusable()
    has_gpus = machine.count() > 0 and not why
    if not has_gpus and _environment.cpu_replicas() is not None:
        return Devices([CPU] * len(devices), CPU, CPU, False, because)
    if machine.count() > 0 or torch_core.has_accelerator():
        if why:
            raise NotImplementedError(
                f"device_ids is {list(device_ids)!r}, and {why}; give ['cpu'] * n"
            )
        indices = [_index(each, "device_ids", device_ids) for each in devices]
        return _placed(indices, because, device_ids, output_device)
    warnings.warn(
        f"device_ids is {list(device_ids)!r}, and there is no GPU: the module is "
        f"called plainly; {_environment.CPU_REPLICAS}=2 in the environment makes "
        "replicas on the CPU of these",
        stacklevel=3,
    )
    return Devices([], CPU, CPU, False, f"{because}, and there is no GPU")


def _placed(
    given: list[Any], because: str, device_ids: Any, output_device: Any
) -> Devices:
    """Return devices with where the outputs and the module are."""
    if any(isinstance(each, int) for each in given):
        output = given[0] if output_device is None else _read_output(output_device)
        source = _gpu.machine.device(given[0])
        return Devices(given, output, source, True, because)
    is_simulated = device_ids is None and _environment.cpu_replicas() is not None
    is_fixed = bool(given) and not is_simulated
    if is_fixed and output_device not in (None, -1) and _device(output_device) != CPU:
        raise ValueError(
            f"output_device is {output_device!r}: replicas on the CPU give their "
            "outputs there; leave it out"
        )
    return Devices(given, CPU, CPU, False, because)


def output_of(output_device: Any) -> torch.device:
    """Return the device that a number stands for, as `Devices` has it."""
    if isinstance(output_device, torch.device):
        return output_device
    return CPU if output_device == -1 else _gpu.machine.device(output_device)


def _default() -> tuple[list[Any], str]:
    machine = _gpu.machine
    n_gpus = machine.count()
    why = machine.why_unusable()
    if n_gpus > 0 and not why:
        return list(range(n_gpus)), "one replica: there is one GPU"
    n_replicas = _environment.cpu_replicas()
    if n_replicas is not None:
        because = f"one replica: {_environment.CPU_REPLICAS} is {n_replicas}"
        return [CPU] * n_replicas if n_replicas > 1 else [], because
    return [], (
        f"one replica: device_ids is None, and {why or 'there is no GPU'}; "
        f"device_ids=['cpu'] * n, or {_environment.CPU_REPLICAS}=n in the environment, "
        "makes n of them on the CPU"
    )


def _read_all(device_ids: Sequence[Any]) -> list[torch.device]:
    if isinstance(device_ids, (str, bytes, int, torch.device)):
        raise TypeError(
            f"device_ids is {device_ids!r}: give a list with one device a replica"
        )
    return [_device(each) for each in device_ids]


def _read_output(output_device: Any) -> int:
    """Return the number of a GPU; -1 for the CPU, as in torch."""
    if output_device == -1:
        return -1
    device = _device(output_device)
    if device == CPU:
        return -1
    return _index(device, "output_device", output_device)


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
    """Return the device that is meant; a number is that of an accelerator."""
    try:
        if isinstance(device_id, int) and not isinstance(device_id, bool):
            return torch.device("cuda", device_id)
        device = torch.device(device_id)
    except (RuntimeError, TypeError) as error:
        words = f"{device_id!r} is not a device, as 'cpu' or 'cuda:0' is: {error}"
        raise TypeError(words) from None
    return CPU if device.type == "cpu" else device


def refuse_gpu(module: torch.nn.Module, because: str) -> None:
    """Raise where a module is on a GPU, and its replicas are not."""
    for name, parameter in module.named_parameters():
        if parameter.device.type not in ("cpu", "meta"):
            raise NotImplementedError(
                f"'{name}' is on device {parameter.device}, and the wrapper's replicas "
                f"are on the CPU ({because}); move the module by .cpu() first, or wrap "
                "it by device_ids that name its GPU first"
            )


def warn_of_imbalance(indices: Sequence[int]) -> None:
    """Warn where one GPU has much less memory, or fewer processors, than another."""
    sizes = [_gpu.machine.size(index) for index in indices]
    for what, values in (
        ("memory", [memory for memory, _ in sizes]),
        ("multiprocessors", [processors for _, processors in sizes]),
    ):
        if min(values) < 0.75 * max(values):
            least = indices[values.index(min(values))]
            most = indices[values.index(max(values))]
            warnings.warn(
                f"There is an imbalance between your GPUs: GPU {least} has less than "
                f"75% of the {what} of GPU {most}, and every replica gets as many "
                "rows. You may want to exclude it by device_ids or "
                "CUDA_VISIBLE_DEVICES",
                stacklevel=3,
            )
