"""The devices of replicas, as they were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline import _environment
from paceline._compat import torch_core

CPU = torch.device("cpu")
NOT_YET = "this version of paceline runs replicas on the CPU"


def read(
    device_ids: Sequence[Any] | None, output_device: Any
) -> tuple[list[torch.device], str]:
    """Return a device for each replica, and why there is only one where that is so."""
    if device_ids is None:
        devices, because = _default()
    else:
        devices, because = _read_ids(device_ids)
    if devices and output_device not in (None, -1) and _device(output_device) != CPU:
        raise ValueError(
            f"output_device is {output_device!r}: replicas on the CPU give their "
            "outputs there; leave it out"
        )
    return devices, because


def _default() -> tuple[list[torch.device], str]:
    n_replicas = _environment.cpu_replicas()
    if n_replicas is None:
        return [], (
            "one replica: device_ids is None; device_ids=['cpu'] * n, or "
            f"{_environment.CPU_REPLICAS}=n in the environment, makes n of them"
        )
    because = f"one replica: {_environment.CPU_REPLICAS} is {n_replicas}"
    return [CPU] * n_replicas if n_replicas > 1 else [], because


def _read_ids(device_ids: Sequence[Any]) -> tuple[list[torch.device], str]:
    if isinstance(device_ids, (str, bytes, int, torch.device)):
        raise TypeError(
            f"device_ids is {device_ids!r}: give a list with one device a replica"
        )
    devices = [_device(each) for each in device_ids]
    n_cpu = devices.count(CPU)
    if n_cpu == len(devices):
        return devices, f"one replica: device_ids is {list(device_ids)!r}"
    if n_cpu:
        raise ValueError(
            f"device_ids is {list(device_ids)!r}: give the CPU only, or GPUs only"
        )
    if torch_core.has_accelerator():
        raise NotImplementedError(
            f"device_ids is {list(device_ids)!r}: {NOT_YET}; give ['cpu'] * n"
        )
    return [], (
        f"one replica: device_ids is {list(device_ids)!r}, and there is no "
        "accelerator; device_ids=['cpu'] * n makes n replicas on the CPU"
    )


def _device(device_id: Any) -> torch.device:
    """Return the device that is meant; a number is that of an accelerator."""
    try:
        if isinstance(device_id, int) and not isinstance(device_id, bool):
            return torch.device("cuda", device_id)
        device = torch.device(device_id)
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"{device_id!r} is no device: {error}") from None
    return CPU if device.type == "cpu" else device


def refuse_gpu(module: torch.nn.Module) -> None:
    """Raise where a module is on a device that replicas cannot be on yet."""
    for name, parameter in module.named_parameters():
        if parameter.device.type not in ("cpu", "meta"):
            raise NotImplementedError(
                f"'{name}' is on device {parameter.device}: {NOT_YET}; move the module "
                "by .cpu() first"
            )
