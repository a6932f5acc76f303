"""Probes of torch's process groups: what is private, or differs by version."""

from __future__ import annotations

import atexit
import datetime
import functools
import multiprocessing
import os
import re
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.utils import _cast_forward_inputs

from paceline._compat import torch_core

_LATE = re.compile("tim(ed|e)[- ]?out", re.IGNORECASE)
_LOST = re.compile("by peer|broken pipe|ncclRemoteError", re.IGNORECASE)
DEFAULT_TIMEOUT_SECONDS = 1800.0
"""The timeout of ``init_process_group`` if none is given (Gloo)."""
DEFAULT_NCCL_TIMEOUT_SECONDS = 600.0
"""The same if NCCL carries the tensors."""


def default_group() -> dist.ProcessGroup:
    """Return the group of ``init_process_group``, or raise torch's ValueError."""
    return c10d._get_default_group()


@functools.cache  # registers once
def wait_for_gloo_at_exit() -> None:
    """Let Gloo's threads drop the tensors of the last collectives before Python exits.

    They may do so after the wait for a collective has returned.  If a thread drops a
    tensor while Python exits, the process aborts.  torch 2.13 does not prevent that if
    something, such as a wrapper, still holds the group.
    """
    atexit.register(time.sleep, 0.05)


_ended: list[Any] = []


def end_all() -> None:
    """End all process groups.

    Before 2.8 torch holds the GIL while it frees a group and waits for Gloo's threads,
    one of which may need the GIL: there the groups stay in memory.
    """
    if torch_core.version() < (2, 8):
        _ended.extend(c10d._world.pg_map)
    dist.destroy_process_group()


def is_timeout(error: RuntimeError) -> bool:
    """Tell whether a collective, or the store, has waited for as long as it may."""
    return _LATE.search(str(error)) is not None


def is_lost_peer(error: RuntimeError) -> bool:
    """Tell whether a collective failed since another process has gone, or is late."""
    kinds = (dist.DistStoreError, dist.DistNetworkError)
    is_lost = isinstance(error, kinds) or _LOST.search(str(error)) is not None
    return is_lost or is_timeout(error)


def is_debugging() -> bool:
    """Tell whether ``TORCH_DISTRIBUTED_DEBUG`` is INFO or DETAIL."""
    return bool(c10d.get_debug_level() != c10d.DebugLevel.OFF)


def is_default_group(group: dist.ProcessGroup) -> bool:
    """Tell whether ``group`` is the default group."""
    return dist.is_initialized() and group is c10d._get_default_group()


def group_rank(group: dist.ProcessGroup) -> int:
    """Return this process's rank in ``group``, or -1 if it is not a member.

    Asks the group itself, which may be unregistered (such as a subclass in Python).
    """
    if not hasattr(group, "rank"):
        return -1  # the token that new_group() returns on ranks outside
    return int(group.rank())


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this process's rank in `group`, by default torch's, and its size.

    Without a group, return those of a single process, or raise ValueError in a process
    that a launcher has started as one of several ranks.
    """
    if group is not None or dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    size = os.environ.get("WORLD_SIZE", "").strip()
    # A process of multiprocessing, such as a DataLoader's, has it from its parent.
    if size not in ("", "1") and multiprocessing.parent_process() is None:
        raise ValueError(
            f"WORLD_SIZE is {size}, but there is no process group: call "
            "paceline.init() before this, and destroy_process_group() after it; in a "
            "process that is not a rank, unset WORLD_SIZE"
        )
    return 0, 1


def is_group_or_token(value: Any) -> bool:
    """Tell whether a value is a process group, or ``new_group()``'s token outside."""
    token = c10d.GroupMember.NON_GROUP_MEMBER
    return hasattr(value, "rank") or (type(value) is type(token) and value == token)


def is_mesh_slice(mesh: Any) -> bool:
    """Tell whether a device mesh is a slice of a larger one."""
    root = getattr(mesh, "_get_root_mesh", None)
    if root is not None:
        return bool(root() != mesh)
    from torch.distributed.device_mesh import _mesh_resources

    for name in ("get_root_mesh", "get_parent_mesh"):
        ask = getattr(_mesh_resources, name, None)
        if ask is not None:
            return ask(mesh) not in (None, mesh)
    return False


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a DTensor: one rank's part of a larger tensor."""
    return hasattr(tensor, "to_local")


def localize(module: torch.nn.Module, is_transformed: bool) -> None:
    """Replace a module's DTensors, of tensor parallelism, by local parameters.

    Parameters
    ----------
    module : torch.nn.Module
        The module; stays unchanged if it has no such parameter.
    is_transformed : bool
        Whether to run torch's transform, as torch's wrapper does if its mesh is a slice
        of a larger one.  The user may have run it before.
    """
    if is_transformed:
        from torch.distributed.tensor.parallel import ddp

        transform: Any = ddp
        transform._pre_dp_module_transform(module)
    if any(hasattr(p, "_st_info") for p in module.parameters()):
        module.register_forward_pre_hook(_make_dtensors, prepend=True)


def _make_dtensors(module: torch.nn.Module, _inputs: Any) -> None:
    """Make DTensors of the local parameters, as torch's hook does.

    From its first forward on, the module has these DTensors as plain attributes instead
    of the parameters.  Gradients reach the parameters only through a graph, so it is
    recorded even under ``no_grad`` and ``inference_mode``.
    """
    from torch.distributed.tensor.parallel import ddp

    transform: Any = ddp
    places = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if hasattr(parameter, "_st_info")
    ]
    if places:
        with torch.inference_mode(False), torch.enable_grad():
            transform._reconstruct_dtensor(module, None)
    for owner, name, parameter in places:
        vars(owner)[name]._paceline_parameter = parameter


def dtensor_parameters(part: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that one module currently holds as DTensors."""
    return [
        (name, value._paceline_parameter)
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and hasattr(value, "_paceline_parameter")
    ]


def own_parameters(part: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of one module, by its own method, and its DTensors."""
    return [*part.named_parameters(recurse=False), *dtensor_parameters(part)]


def broadcast(group: dist.ProcessGroup, tensors: list[torch.Tensor], root: int) -> None:
    """Overwrite every rank's tensors with the root's, as torch's own wrapper does."""
    dist._broadcast_coalesced(group, tensors, 250 * 2**20, root)  # type: ignore[attr-defined]


def group_store(group: dist.ProcessGroup) -> Any:
    """Return the key-value store that ``group`` was created with, or None."""
    try:
        return c10d._world.pg_map[group][1]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def registered() -> list[Any]:
    """Return all groups that torch has registered, and their stores."""
    return list(c10d._world.pg_map.items())


def is_store_of_rank_0(group: dist.ProcessGroup) -> bool:
    """Tell whether the store of ``group`` is known to be in its rank 0's process."""
    ranks, method = c10d._world.pg_group_ranks.get(group), c10d._default_pg_init_method
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    is_by_address = re.match("(env|tcp)://", method or "") is not None
    return is_by_address and not is_agents and (ranks or {}).get(0) == 0


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name that ``group`` has on all ranks."""
    return str(group.group_name)


def backends_by_device() -> str:
    """Return the default backend of each device type: "cpu:gloo,cuda:nccl"."""
    return str(c10d.get_backend_config())


def cpu_backend_name(group: dist.ProcessGroup) -> str:
    """Return the name of the backend for CPU tensors in ``group``, such as ``"gloo"``.

    For an unregistered subclass in Python, return the name of its class.
    """
    with suppress(RuntimeError, AttributeError):
        return str(group._get_backend(torch.device("cpu")).name())
    try:
        return str(dist.get_backend(group))
    except (ValueError, TypeError):  # early versions of torch raise TypeError
        return type(group).__name__


def all_gather_options() -> Any:
    """Return the options of an all-gather, which a group in Python may require."""
    return c10d.AllgatherOptions()  # type: ignore[attr-defined]


def is_device_bound(group: dist.ProcessGroup) -> bool:
    """Tell whether ``group`` carries only tensors of a GPU, as NCCL's groups do."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return _device_backend(group) is not None
    except AttributeError:
        return False
    return False


def _device_backend(group: dist.ProcessGroup) -> Any:
    with suppress(RuntimeError, AttributeError):
        return group._get_backend(torch.device("cuda"))
    return None


def make_gloo(store: Any, rank: int, size: int, seconds: float) -> Any:
    """Return a private Gloo group of the same ranks.

    It is not registered: torch numbers registered groups by how many a rank has made.
    """
    timeout = datetime.timedelta(seconds=seconds)
    prefixed = dist.PrefixStore("gloo", store)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(prefixed, rank, size, timeout)


def group_timeout_seconds(group: dist.ProcessGroup, device_type: str = "cpu") -> float:
    """Return the user's timeout of a group: that of `device_type`'s backend first."""
    for kind in dict.fromkeys((device_type, "cpu", "cuda")):
        with suppress(RuntimeError, AttributeError):
            timeout: datetime.timedelta = group._get_backend(
                torch.device(kind)
            ).options._timeout
            return timeout.total_seconds()
    if is_device_bound(group):
        return DEFAULT_NCCL_TIMEOUT_SECONDS
    return DEFAULT_TIMEOUT_SECONDS


def cast_inputs(dtype: torch.dtype, *inputs: Any) -> Any:
    """Return inputs whose tensors of real numbers, however nested, have a dtype."""
    return _cast_forward_inputs(dtype, *inputs)[0]
