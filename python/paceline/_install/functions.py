"""torch.nn.parallel's functions, which also serve replicas on the CPU.

Subclasses of DataParallel call them, and loops without a wrapper.  On a machine with
GPUs they are torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import gather as torchs_gather
from torch.nn.parallel import parallel_apply as torchs_parallel_apply
from torch.nn.parallel import replicate as torchs_replicate
from torch.nn.parallel import scatter as torchs_scatter
from torch.nn.parallel.scatter_gather import scatter_kwargs as torchs_scatter_kwargs

from paceline import _native
from paceline._dp import devices as devices_
from paceline._dp.data_parallel import DataParallel

_nothing = torch.nn.Identity()


def _on_cpu(
    targets: Any, module: torch.nn.Module = _nothing, dim: int = 0
) -> DataParallel[Any] | None:
    """Return a wrapper for targets on the CPU; None if they are torch's to serve."""
    given = list(targets) if isinstance(targets, (list, tuple, range)) else [targets]
    is_cpu = all(each == -1 or str(each).startswith("cpu") for each in given)
    if devices_.has_gpus() or not (is_cpu or devices_.stand_in()):
        return None
    return DataParallel(module, [devices_.CPU] * len(given), dim=dim)


def scatter(inputs: Any, target_gpus: Any, dim: int = 0) -> Any:
    """Do as ``torch.nn.parallel.scatter``, also for replicas on the CPU."""
    wrapper = _on_cpu(target_gpus, dim=dim)
    if wrapper is None:
        return torchs_scatter(inputs, target_gpus, dim)
    args, _ = wrapper.scatter((inputs,), None, wrapper.device_ids)
    parts = [part for (part,) in args]
    if isinstance(inputs, torch.Tensor):
        return tuple(parts)
    return parts if _native.flatten(inputs)[1] else parts * len(wrapper.device_ids)


def scatter_kwargs(inputs: Any, kwargs: Any, target_gpus: Any, dim: int = 0) -> Any:
    """Do as ``torch.nn.parallel.scatter_gather.scatter_kwargs``, also on the CPU."""
    wrapper = _on_cpu(target_gpus, dim=dim)
    if wrapper is None:
        return torchs_scatter_kwargs(inputs, kwargs, target_gpus, dim)
    return wrapper.scatter(inputs, kwargs, wrapper.device_ids)


def gather(outputs: Any, target_device: Any, dim: int = 0) -> Any:
    """Do as ``torch.nn.parallel.gather``, also for replicas on the CPU."""
    wrapper = _on_cpu(target_device, dim=dim)
    if wrapper is None:
        return torchs_gather(outputs, target_device, dim)
    return wrapper.gather(outputs, None)


def replicate(network: Any, devices: Any, detach: bool = False) -> Any:
    """Do as ``torch.nn.parallel.replicate``, also for replicas on the CPU."""
    wrapper = _on_cpu(devices, network)
    if wrapper is None:
        return torchs_replicate(network, devices, detach)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        return wrapper.replicate(network, wrapper.device_ids)


def parallel_apply(
    modules: Any, inputs: Any, kwargs_tup: Any = None, devices: Any = None
) -> Any:
    """Do as ``torch.nn.parallel.parallel_apply``, also for replicas on the CPU."""
    wrapper = _on_cpu(devices or [0] * len(modules), modules[0])
    if wrapper is None:
        return torchs_parallel_apply(modules, inputs, kwargs_tup, devices)
    return wrapper.parallel_apply(modules, inputs, kwargs_tup)
