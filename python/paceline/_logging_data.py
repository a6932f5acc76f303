"""The dict that ``_get_ddp_logging_data()`` returns: torch's keys, our truth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline import _environment, _torch_groups
from paceline._journal import in_words

if TYPE_CHECKING:
    from paceline._surface import Surface

_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_ALWAYS = (
    "MASTER_PORT",
    "MASTER_ADDR",
    "TORCH_DISTRIBUTED_DEBUG",
    "CUDA_VISIBLE_DEVICES",
)
_OF_BACKEND = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}
_GLOO_THREADS = 2  # torch's ProcessGroupGloo


def of(wrapper: Surface) -> dict[str, Any]:
    """Return all that is known of a wrapper: strings, and whole numbers.

    Times are in nanoseconds, sizes in bytes; torch documents the keys in
    ``c10/util/Logging.h``.
    """
    wrapper._compare_with_last_step()
    data = _of_construction(wrapper)
    data["can_set_static_graph"] = int(wrapper._journal.is_static)
    if wrapper.static_graph:
        data["static_graph"] = 1
    if wrapper._comm_hook_name:
        data["comm_hook"] = wrapper._comm_hook_name
    data |= wrapper._journal.entries
    if wrapper.skip_all_reduce_unused_params:
        data["num_buckets_reduced"] = wrapper._journal.n_buckets_used
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        data.pop("has_rebuilt_buckets", None)  # torch's are rebuilt without it alone
    return data


def _of_construction(wrapper: Surface) -> dict[str, Any]:
    parameters = wrapper._model.trainable
    sizes = [p.numel() * p.element_size() for p in parameters]
    buckets = wrapper._journal.first_buckets or [list(range(len(parameters)))]
    backend = _backend_of(wrapper.process_group)
    data: dict[str, Any] = {
        "world_size": wrapper.process_group.size(),
        "rank": wrapper.process_group.rank(),
        "module_name": type(wrapper.module).__name__,
        "device_ids": in_words(wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "bucket_cap_bytes": int(wrapper.bucket_bytes_cap),
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "is_multi_device_module": 0,
        "has_sync_bn": int(
            any(
                isinstance(part, torch.nn.SyncBatchNorm)
                for part in wrapper.module.modules()
            )
        ),
        "backend_name": backend,
        "dtypes": ", ".join(
            sorted({_DTYPES.get(p.dtype, str(p.dtype)) for p in parameters})
        ),
        "total_parameter_size_bytes": sum(sizes),
        "num_parameter_tensors": len(parameters),
        "bucket_sizes": in_words(sum(sizes[i] for i in b) for b in buckets),
        "iteration": 0,
    }
    for name in (*_ALWAYS, *_OF_BACKEND.get(backend, ())):
        key = name.lower().removeprefix("torch_" if "NCCL" in name else "")
        data[key] = _environment.of_launcher(name)
    if backend == "gloo":
        data["gloo_num_threads"] = _GLOO_THREADS
    return data


def _backend_of(group: dist.ProcessGroup) -> str:
    try:
        return str(dist.get_backend(group))
    except (RuntimeError, ValueError, TypeError):  # not registered, or destroyed
        return _torch_groups.cpu_backend_name(group)
