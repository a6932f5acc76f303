"""What of torch's process groups is private or differs by version."""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import re
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_LATE = re.compile("tim(ed|e)[- ]?out", re.IGNORECASE)
_LOST = re.compile("by peer|broken pipe|ncclRemoteError", re.IGNORECASE)
DEFAULT_TIMEOUT_SECONDS = 1800.0
"""What ``init_process_group`` uses where no timeout is given (Gloo)."""
DEFAULT_NCCL_TIMEOUT_SECONDS = 600.0
"""The same, where NCCL carries the tensors."""


def default_group() -> dist.ProcessGroup:
    """Return the group of ``init_process_group``, or raise torch's ValueError."""
    return c10d._get_default_group()


@functools.cache  # once is enough
def wait_for_gloo_at_exit() -> None:
    """Let Gloo's threads drop what the last collectives held, before Python ends.

    They do so behind the back of who waited, and a tensor that a thread drops when
    Python ends aborts the process; torch 2.13 does not prevent it where anybody, such
    as a wrapper, still holds the group.
    """
    atexit.register(time.sleep, 0.05)


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
    """Tell whether ``group`` is the default one."""
    return dist.is_initialized() and group is c10d._get_default_group()


def group_rank(group: dist.ProcessGroup) -> int:
    """Return this rank in ``group``; -1 where it is none of the group's.

    A group that nobody registered (a subclass in Python, say) knows for itself.
    """
    if not hasattr(group, "rank"):
        return -1  # the token that new_group() gives to ranks outside
    return int(group.rank())


def is_group_or_token(value: Any) -> bool:
    """Tell a process group, and what ``new_group()`` gives to ranks outside."""
    token = c10d.GroupMember.NON_GROUP_MEMBER
    return hasattr(value, "rank") or (type(value) is type(token) and value == token)


def is_mesh_slice(mesh: Any) -> bool:
    """Tell whether a device mesh is a part of a larger one."""
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
    """Tell whether a tensor is one rank's part of a larger one."""
    return hasattr(tensor, "to_local")


def localize(module: torch.nn.Module, is_transformed: bool) -> None:
    """Have a module's DTensors, of tensor parallelism, be parameters of local tensors.

    Parameters
    ----------
    module : torch.nn.Module
        The module; unchanged where it has no such parameter.
    is_transformed : bool
        Whether to run torch's transform, as torch's wrapper does where its mesh is a
        slice of a larger one.  Users may have run it themselves.
    """
    if is_transformed:
        from torch.distributed.tensor.parallel import ddp

        transform: Any = ddp
        transform._pre_dp_module_transform(module)
    if any(hasattr(p, "_st_info") for p in module.parameters()):
        module.register_forward_pre_hook(_make_dtensors, prepend=True)


def _make_dtensors(module: torch.nn.Module, _inputs: Any) -> None:
    """Make DTensors of the local parameters, in the place of torch's hook.

    From its first forward on the module has these DTensors as plain attributes, and no
    longer the parameters.  The gradients reach them only by a graph, so that is
    recorded in an evaluation too.
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
    """Return the parameters of one module that it has as DTensors now."""
    return [
        (name, value._paceline_parameter)
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and hasattr(value, "_paceline_parameter")
    ]


def own_parameters(part: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of one module, by its own method, DTensors among them."""
    return [*part.named_parameters(recurse=False), *dtensor_parameters(part)]


def broadcast(group: dist.ProcessGroup, tensors: list[torch.Tensor], root: int) -> None:
    """Overwrite every rank's tensors with one rank's, as torch's own wrapper does."""
    dist._broadcast_coalesced(group, tensors, 250 * 2**20, root)  # type: ignore[attr-defined]


def group_store(group: dist.ProcessGroup) -> Any:
    """Return the key-value store that ``group`` was made over, if torch shows it."""
    try:
        return c10d._world.pg_map[group][1]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def is_store_of_rank_0(group: dist.ProcessGroup) -> bool:
    """Tell whether the store of ``group`` is known to be in its rank 0's process."""
    ranks, method = c10d._world.pg_group_ranks.get(group), c10d._default_pg_init_method
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    is_by_address = re.match("(env|tcp)://", method or "") is not None
    return is_by_address and not is_agents and (ranks or {}).get(0) == 0


def make_local_store() -> Any:
    """Return a key-value store for a group of one rank."""
    return dist.HashStore()  # type: ignore[attr-defined]


def connect_store(host: str, port: int, timeout: datetime.timedelta) -> Any:
    """Return a store that somebody else's process serves."""
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]


def store_below(prefix: str, store: Any) -> Any:
    """Return the part of a store whose keys begin so."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def make_tcp_server(address: str) -> tuple[Any, int]:
    """Return a key-value store that listens at a free port, and the port.

    It listens until it is collected.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, 0, is_master=True, wait_for_workers=False
    )
    return store, int(store.port)


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name by which all ranks know ``group``."""
    return str(group.group_name)


def backends_by_device() -> str:
    """Return what carries each device's tensors by default: "cpu:gloo,cuda:nccl"."""
    return str(c10d.get_backend_config())


def cpu_backend_name(group: dist.ProcessGroup) -> str:
    """Return the name of what carries CPU tensors in ``group``: ``"gloo"``, say.

    A subclass in Python that is no registered group has the name of its class.
    """
    with suppress(RuntimeError, AttributeError):
        return str(group._get_backend(torch.device("cpu")).name())
    try:
        return str(dist.get_backend(group))
    except (ValueError, TypeError):  # of an early torch: its own assertion
        return type(group).__name__


def all_gather_options() -> Any:
    """Return the options of an all-gather, which a group in Python may insist on."""
    return c10d.AllgatherOptions()  # type: ignore[attr-defined]


def is_device_bound(group: dist.ProcessGroup) -> bool:
    """Tell whether ``group`` carries a GPU's tensors and none of the CPU (NCCL)."""
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
    """Return a group of the same ranks over Gloo, which nobody else knows of.

    It is no registered one: those are numbered by how many each rank has made.
    """
    timeout = datetime.timedelta(seconds=seconds)
    prefixed = dist.PrefixStore("gloo", store)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(prefixed, rank, size, timeout)


def group_timeout_seconds(group: dist.ProcessGroup, device_type: str = "cpu") -> float:
    """Return the user's timeout of a group, of the backend of `device_type` first."""
    for kind in dict.fromkeys((device_type, "cpu", "cuda")):
        with suppress(RuntimeError, AttributeError):
            timeout: datetime.timedelta = group._get_backend(
                torch.device(kind)
            ).options._timeout
            return timeout.total_seconds()
    if is_device_bound(group):
        return DEFAULT_NCCL_TIMEOUT_SECONDS
    return DEFAULT_TIMEOUT_SECONDS
