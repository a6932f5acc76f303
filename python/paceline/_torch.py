"""Every probe of torch: what differs by version, or has no public name.

Nothing else in the package asks for a torch version or touches a private name.
"""

from __future__ import annotations

import datetime
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch.distributed import distributed_c10d as c10d

from paceline import _native, _sparse

MINIMUM = (2, 4)
DEFAULT_TIMEOUT_SECONDS = 1800.0
"""What ``init_process_group`` uses where no timeout is given (Gloo)."""


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def attach() -> None:
    """Hand torch's callables to the native module; done once, when torch is needed.

    Raises
    ------
    ImportError
        If torch is older than 2.4.
    """
    if _version() < MINIMUM:
        raise ImportError(
            f"paceline needs torch {MINIMUM[0]}.{MINIMUM[1]} or newer, and this is "
            f"{torch.__version__}"
        )
    _native.attach_torch(
        queue_callback=torch.autograd.Variable._execution_engine.queue_callback,
        current_node=torch._C._current_autograd_node,
        is_grad_enabled=torch.is_grad_enabled,
        is_compiled=is_compiled_autograd,
        increment_version=torch.autograd.graph.increment_version,
        empty_like=torch.empty_like,
        from_dlpack=torch.utils.dlpack.from_dlpack,
        sparse_read=_sparse.read,
        sparse_room=_sparse.room,
        sparse_put=_sparse.put,
        sparse_densify=_sparse.densify,
        sparse_put_dense=_sparse.put_dense,
        # torch 2.10 and newer; before, tensors go through capsules
        exchange=getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
    )


def is_compiled_autograd() -> bool:
    """Tell whether compiled autograd runs backward: final callbacks are not called."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return any(
        getattr(module, flag, False)
        for flag in ("in_compiled_autograd_region", "compiled_autograd_enabled")
    )


def is_in_backward() -> bool:
    """Tell whether this thread evaluates a node of an autograd graph."""
    return torch._C._current_autograd_node() is not None


def default_group() -> dist.ProcessGroup:
    """Return the process group that ``init_process_group`` made.

    Raises
    ------
    ValueError
        If there is none, with torch's own words.
    """
    return c10d._get_default_group()


def is_default_group(group: dist.ProcessGroup) -> bool:
    """Tell whether ``group`` is the default one."""
    return dist.is_initialized() and group is c10d._get_default_group()


def group_store(group: dist.ProcessGroup) -> Any:
    """Return the key-value store that ``group`` was made over, if torch shows it."""
    try:
        return c10d._world.pg_map[group][1]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name by which all ranks know ``group``."""
    return str(group.group_name)


def cpu_backend_name(group: dist.ProcessGroup) -> str:
    """Return the name of what carries CPU tensors in ``group``: ``"gloo"``, say."""
    try:
        return str(group._get_backend(torch.device("cpu")).name())
    except (RuntimeError, AttributeError):
        return str(dist.get_backend(group))


def group_timeout_seconds(group: dist.ProcessGroup) -> float:
    """Return the timeout, in seconds, that the user gave the group."""
    try:
        timeout: datetime.timedelta = group._get_backend(
            torch.device("cpu")
        ).options._timeout
        return timeout.total_seconds()
    except (RuntimeError, AttributeError):
        return DEFAULT_TIMEOUT_SECONDS


def is_lazy(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter or buffer of a lazy module has no shape yet."""
    from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

    return isinstance(parameter, UninitializedTensorMixin)


def tensor_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested containers, as torch's pytrees see them."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(tree)


def is_profiling() -> bool:
    """Tell whether a profiler would see a ``record_function``."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements fill one block of memory, each once."""
    block = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dim for dim in dims if dim[1] != 1):
        if stride != block:
            return False
        block *= size
    return True
