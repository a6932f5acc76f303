"""Every probe of torch: what differs by version, or has no public name.

Nothing else in the package asks for a torch version or touches a private name.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch.distributed import distributed_c10d as c10d
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from paceline import _native, _sparse, _tree

MINIMUM = (2, 4)
DEFAULT_TIMEOUT_SECONDS = 1800.0
"""What ``init_process_group`` uses where no timeout is given (Gloo)."""


FIXED_TYPES = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)
"""Types of which the same object is always the same value."""


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
        increment_version=increment_version,
        empty_like=torch.empty_like,
        from_dlpack=torch.utils.dlpack.from_dlpack,
        sparse_read=_sparse.read,
        sparse_room=_sparse.room,
        sparse_put=_sparse.put,
        sparse_densify=_sparse.densify,
        sparse_put_dense=_sparse.put_dense,
        cat=torch.cat,
        stack=torch.stack,
        dataclass_fields=dataclasses.fields,
        is_strided=_tree.is_strided,
        packed_rows=_tree.packed_rows,
        split_packed=_tree.split_packed,
        join_packed=_tree.join_packed,
        join_arrays=_tree.join_arrays,
        tensor_type=torch.Tensor,
        size_type=torch.Size,
        device_type=torch.device,
        packed_type=PackedSequence,
        marker_type=_tree.Replicated,
        default_dict_type=collections.defaultdict,
        user_dict_type=collections.UserDict,
        cached_type=functools.cached_property,
        fixed_types=FIXED_TYPES,
        registry=_pytree.SUPPORTED_NODES,
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


_modules: Any = torch.nn.modules.module
_GLOBAL_HOOKS = [
    getattr(_modules, name, {})
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
]


def has_global_hooks() -> bool:
    """Tell whether hooks are registered that every module runs."""
    return any(_GLOBAL_HOOKS)


def keeps_graph() -> bool:
    """Tell, inside a backward, whether its graph is kept (``retain_graph=True``)."""
    probe = getattr(
        torch._C._autograd, "_get_current_graph_task_keep_graph", None
    )  # torch 2.1 and newer
    return True if probe is None else bool(probe())


def accumulates(leaf: Any) -> bool:
    """Tell, inside a backward, whether it adds to ``.grad`` of all that it reaches.

    Parameters
    ----------
    leaf : torch.autograd.graph.Node
        The node of a leaf that the backward reaches and that nobody can ask for.  Only
        a ``backward()`` that was given no inputs runs it; torch refuses to answer where
        gradients are returned.
    """
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:
        return False


def is_in_torch_ddp() -> bool:
    """Tell whether torch's DistributedDataParallel runs its forward now.

    Its hooks are on nodes of the graph, where nothing shows them.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    return getattr(ddp, "_active_ddp_module", None) is not None


def run_backward(
    outputs: list[torch.Tensor], gradients: list[torch.Tensor], keep_graph: bool
) -> None:
    """Add to ``.grad`` of what `outputs` depend on, with no more ado than it takes.

    ``torch.autograd.backward`` does the same after 20 us of checks and defaults.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(outputs),
        tuple(gradients),
        keep_graph,
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


_BATCHED_KEYS = [
    torch._C._parse_dispatch_key(name) for name in ("Batched", "FuncTorchBatched")
]


def is_batched(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is one of vmap's, old or new: many at once, behind one."""
    keys = torch._C._dispatch_keys(tensor)
    return any(key is not None and keys.has(key) for key in _BATCHED_KEYS)


def increment_version(tensors: Any) -> None:
    """Tell autograd that tensors were overwritten: one, or several.

    An early torch takes one at a time.
    """
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def at_end_of_backward(call: Any) -> None:
    """Have the engine call `call` when the backward that runs now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def autocast_on_cpu() -> tuple[bool, torch.dtype, bool]:
    """Return whether autocast is on for the CPU, its dtype, and whether it caches."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


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
    return _pytree.tree_leaves(tree)


def has_accelerator() -> bool:
    """Tell whether torch's own DataParallel would find devices to use here."""
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6 and newer
    if accelerator is None:
        return torch.cuda.is_available()
    if not accelerator.is_available():
        return False
    return str(accelerator.current_accelerator().type) != "mps"


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


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have dynamo leave a function, and what it calls, as it is.

    Dynamo is costly to import: where nobody has, there is nothing to keep off.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:
                return function(*args)
            disabled = disable(function)
        return disabled(*args)

    return call


def children(value: Any) -> list[Any]:
    """Return what a value of a type that is registered as a pytree is made of."""
    node = _pytree.SUPPORTED_NODES.get(type(value))
    return list(node.flatten_fn(value)[0]) if node is not None else []
