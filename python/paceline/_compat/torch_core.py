"""Probes of torch: what differs by version, or has no public name.

Code outside ``_compat`` uses no private name of torch and does not check its version.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree
from torch.utils.data import BatchSampler, dataloader

from paceline import _native
from paceline._compat import (
    mistakes,
    packed_sequence,
    sparse_rows,
    torch_cuda,
    torch_graph,
)

MINIMUM = (2, 4)
_Function = TypeVar("_Function", bound=Callable[..., Any])

FUTURES = (torch.futures.Future, torch._C.Future)
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
NORMS: Any = torch.nn.modules.batchnorm._NormBase  # of batches and of instances
PLAIN_COPY = torch.nn.Module._replicate_for_data_parallel
RNN_COPY = torch.nn.RNNBase._replicate_for_data_parallel


def key_error_message(message: str) -> str:
    """Return the message as a string that a ``KeyError`` prints without escapes."""
    return torch._utils.KeyErrorMessage(message)


def version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


_queue_callback: Callable[[Any], None]
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


def attach() -> None:
    """Pass torch's callables to the native module, once; needs torch 2.4 or later."""
    if version() < MINIMUM:
        raise ImportError(
            f"paceline needs torch {MINIMUM[0]}.{MINIMUM[1]} or newer, and this is "
            f"{torch.__version__}"
        )
    _native.attach_torch(
        queue_callback=at_end_of_backward,
        current_node=torch._C._current_autograd_node,
        after_node=after_node,
        is_grad_enabled=torch.is_grad_enabled,
        is_compiled=is_compiled_autograd,
        # C functions, so that Ctrl-C cannot interrupt the end of a step.
        increment_version=torch._C._increment_version
        if _increments_several()
        else functools.partial(map, torch._C._increment_version),
        empty_like=torch.empty_like,
        from_dlpack=torch._C._from_dlpack,
        to_dlpack=torch._C._to_dlpack,
        sparse_read=sparse_rows.read,
        sparse_room=sparse_rows.room,
        sparse_densify=sparse_rows.densify,
        cat=torch.cat,
        stack=torch.stack,
        dataclass_fields=dataclasses.fields,
        copy_attributes=packed_sequence.copy_attributes,
        layout_of=packed_sequence.layout_of,
        repeats_row=packed_sequence.repeats_row,
        packed_rows=packed_sequence.packed_rows,
        split_packed=packed_sequence.split_packed,
        join_packed=packed_sequence.join_packed,
        join_arrays=packed_sequence.join_arrays,
        warn_of_scalars=mistakes.warn_of_scalars,
        tensor_type=torch.Tensor,
        size_type=torch.Size,
        packed_type=PackedSequence,
        marker_type=packed_sequence.Replicated,
        registry=_pytree.SUPPORTED_NODES,
        # torch 2.10 and newer; with older ones, tensors go through capsules
        exchange=getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
        current_stream=torch_cuda.current_stream,
        device_empty=torch_cuda.empty,
        record_stream=torch_cuda.record_stream,
        view_of=torch_cuda.view_of,
        current_task=torch_graph.current_task,
    )


_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"


def is_compiled_autograd() -> bool:
    """Tell whether compiled autograd runs backward: it calls no final callbacks."""
    module = sys.modules.get(_COMPILED_AUTOGRAD)
    flags = "in_compiled_autograd_region", "compiled_autograd_enabled"
    return any(getattr(module, flag, False) for flag in flags)


def is_in_backward() -> bool:
    """Tell whether this thread evaluates a node of an autograd graph."""
    return torch._C._current_autograd_node() is not None


def accumulates(leaf: Any) -> bool:
    """Tell, inside a backward, whether it adds to ``.grad`` of every leaf it reaches.

    `leaf` is the node of a leaf that the user cannot pass as an input, so that only a
    ``backward()`` without inputs runs it.  torch raises if gradients are returned.
    """
    return torch_graph.will_run(leaf, is_returned=False)


_TorchDP = torch.nn.DataParallel
_TorchDDP: Any = torch.nn.parallel.distributed.DistributedDataParallel
WRAPPERS: tuple[Any, ...] = _TorchDP, _TorchDDP


def name_inside(module: Any) -> str:
    """Return the attribute of a wrapper that has the module inside, or ""."""
    if isinstance(module, WRAPPERS):
        return "module"
    compiler = sys.modules.get("torch._dynamo")  # its import takes seconds
    is_compiled = isinstance(module, getattr(compiler, "OptimizedModule", ()))
    return "_orig_mod" if is_compiled else ""


def is_torch_ddp(module: Any) -> bool:
    """Tell whether a module is torch's DistributedDataParallel, and not ours.

    Torch's class puts its hooks on nodes of the graph, where we cannot find them.
    """
    return isinstance(module, _TorchDDP) and not hasattr(type(module), "_is_ours")


def warn_of_wrapper(module: torch.nn.Module, outer: type) -> None:
    """Warn if the module to wrap is already a data-parallel wrapper."""
    if isinstance(module, WRAPPERS):
        warnings.warn(
            f"{outer.__name__}(module): module is a {type(module).__name__} already, "
            "and one wrapper is enough; give the module inside it, module.module",
            stacklevel=3,
        )


def torch_ddp_in_forward() -> Any:
    """Return the wrapper of torch's class that runs its forward now, or None."""
    active = getattr(_TorchDDP, "_active_ddp_module", None)
    return active if active is not None and is_torch_ddp(active) else None


_has_compiled = False


def is_compile_used() -> bool:
    """Tell whether this process has used ``torch.compile``."""
    global _has_compiled
    module = sys.modules.get("torch._dynamo.eval_frame")
    if not _has_compiled and module is not None:
        backends = getattr(module, "cached_backends", {"": True})
        # None marks code that dynamo does not compile.  reset() clears the backends,
        # but not the callback that compiles what this thread calls.
        _has_compiled = any(backends.values()) or _has_eval_frame_callback()
    return _has_compiled


def _has_eval_frame_callback() -> bool:
    native: Any = torch._C._dynamo.eval_frame
    ask = getattr(native, "get_eval_frame_callback", None)
    return ask is not None and ask() is not None


def exchange_active_ddp(wrapper: Any) -> Any:
    """Set the wrapper whose forward runs, and return the previous one.

    Dynamo splits graphs at its buckets.  The attribute is one of torch's class: setting
    it clears Python's caches of that class and of ours, which costs 4 us a forward.
    """
    before = _TorchDDP._active_ddp_module
    _TorchDDP._active_ddp_module = wrapper
    return before


def run_backward(
    outputs: list[torch.Tensor], gradients: list[torch.Tensor], keep_graph: bool
) -> None:
    """Run backward from `outputs`, and add to ``.grad`` of the leaves.

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


@functools.cache
def _increments_several() -> bool:
    try:
        torch.autograd.graph.increment_version([])
    except (TypeError, RuntimeError):  # one tensor at a time
        return False
    return True


def increment_version(tensors: Any) -> None:
    """Tell autograd that one or several tensors were overwritten."""
    if isinstance(tensors, torch.Tensor) or _increments_several():
        torch.autograd.graph.increment_version(tensors)
        return
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


def after_node(node: Any, call: Callable[[], Any]) -> None:
    """Call `call` once, after the node under evaluation.

    A hook on the node calls it, if torch collects hooks after the evaluation.  Early
    versions collect them before: there a hook on the nodes that follow calls it, when
    the first of them begins.  Only the node itself holds a reference to `call`.
    """
    handles: list[Any] = []

    def once(*_: Any) -> None:
        if handles:
            for handle in handles:
                handle.remove()
            handles.clear()
            call()

    held = weakref.ref(once)

    def once_if_held(*_: Any) -> None:
        if (call_it := held()) is not None:
            call_it()

    handles.append(node.register_hook(once))
    followers = {follower for follower, _ in node.next_functions if follower}
    handles.extend(follower.register_prehook(once_if_held) for follower in followers)


def at_end_of_backward(call: Any) -> None:
    """Have the engine call `call` when the current backward has ended.

    Compiled autograd does not call it, but drops it then.  In early versions of torch
    it refuses callbacks: `call` is then held until the compiled function has returned.
    """
    try:
        _queue_callback(call)
    except RuntimeError:
        if not is_compiled_autograd():
            raise
        _hold_while_compiled(call)


class _Hold:
    """A profile function that holds objects until a frame returns or raises."""

    __slots__ = ("_frame", "held")

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self.held: Any = []

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if frame is self._frame and event == "return":
            sys.setprofile(None)
            self._frame = None
            self.held = None  # last: dropping an object may run code that calls this


def _hold_while_compiled(thing: Any) -> None:
    hold: Any = sys.getprofile()
    if hold is None:
        frame: Any = sys._getframe(1)  # our own frame would hold itself, and `thing`
        while frame and frame.f_globals.get("__name__") != _COMPILED_AUTOGRAD:
            frame = frame.f_back
        if frame:
            hold = _Hold(frame)
            sys.setprofile(hold)
    if type(hold) is not _Hold:
        raise RuntimeError(
            f"compiled autograd of torch {torch.__version__} runs no callback when a "
            "backward ends: turn off the Python profiler (sys.setprofile), or use a "
            "newer torch"
        )
    hold.held.append(thing)


def is_lazy(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter or buffer of a lazy module has no shape yet."""
    from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

    return isinstance(parameter, UninitializedTensorMixin)


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, as torch's pytrees see them."""
    return list(filter(torch.is_tensor, _pytree.tree_leaves(tree)))


def tensors_with_graph(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers that require gradients."""
    leaves, _ = _native.leaves(value)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]


def hook_outputs(value: Any, hook: Callable[[Any], object]) -> bool:
    """Have backward call a hook at the outputs in ``value``; tell whether it has any.

    An output is a tensor that was computed in a graph, and so no leaf.
    """
    return torch_graph.call_in_backward(tensors_with_graph(value), {0: hook})


def has_accelerator() -> bool:
    """Tell whether torch's own DataParallel would find devices here."""
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6 and newer
    if accelerator is None:
        return torch.cuda.is_available()
    if not accelerator.is_available():
        return False
    return str(accelerator.current_accelerator().type) != "mps"


def is_profiling() -> bool:
    """Tell whether a profiler would record a ``record_function``."""
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


def has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has memory: a subclass that wraps others has none."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.numel() == 0 or tensor.data_ptr() != 0


def storage_of(tensor: torch.Tensor) -> int:
    """Return a tensor's storage for `count_holders`; valid while the storage lives."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def count_holders(storages: Iterable[int]) -> int:
    """Return the number of references to these storages, from tensors and others."""
    return sum(map(torch._C._storage_Use_Count, storages))


def uncompiled(function: _Function) -> _Function:
    """Have dynamo compile neither a function nor what it calls.

    Dynamo is costly to import, so this asks it only once the program has imported it;
    what it returns is costly to call, so this does so only if the program compiles.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:
                return function(*args, **options)
            disabled = disable(function)
        if torch.compiler.is_dynamo_compiling() or is_compile_used():
            return disabled(*args, **options)
        return function(*args, **options)

    skip_frames(call)
    return cast("_Function", call)


def accumulation_node(parameter: torch.Tensor) -> Any:
    """Return the node of autograd's graph that adds to a parameter's ``.grad``.

    A hook on the node does not mix with the user's hooks on the parameter.  None if a
    transform of ``torch.func`` runs, which has other graphs.
    """
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    return node.next_functions[0][0] if node is not None else None


def is_accumulation_held(leaf: torch.Tensor) -> bool:
    """Tell whether anything holds the node that adds to a leaf's ``.grad``.

    torch does not tell whether the node has hooks.  Code that registers one must hold
    the node, because torch itself does not.
    """
    return _count_holders_of_node(leaf) > _holders_of_new_node()


@functools.cache
def _holders_of_new_node() -> int:
    return _count_holders_of_node(torch.ones(1, requires_grad=True))


def _count_holders_of_node(leaf: torch.Tensor) -> int:
    with torch.enable_grad():
        view = leaf.view_as(leaf)  # holds the node itself, as any graph may
    if view.grad_fn is None:
        return 0
    return sys.getrefcount(view.grad_fn.next_functions[0][0])


def has_buffer_property() -> bool:
    """Tell whether torch has deprecated ``broadcast_buffers`` (2.13)."""
    ddp = torch.nn.parallel.DistributedDataParallel
    return isinstance(getattr(ddp, "broadcast_buffers", None), property)


def read_by_loader(
    frame: types.FrameType | None, depth: int = 4
) -> tuple[int, dict[str, Any]]:
    """Return how many batches a DataLoader gives its workers before its loop begins.

    Return the attributes of its iterator too: ``_num_yielded`` counts the batches that
    the loop has received.  A reference to the iterator itself would keep its workers
    alive.  ``frame`` called the sampler's ``__iter__``; up to `depth` callers may wrap
    it.
    """
    owner = frame.f_locals.get("self") if frame is not None else None
    if isinstance(owner, dataloader._BaseDataLoaderIter):
        loader = frame.f_locals.get("loader") if frame is not None else None
        if owner._num_workers > 1 and not getattr(loader, "in_order", True):
            raise ValueError("this sampler counts batches in order: set in_order=True")
        n_each = getattr(owner, "_prefetch_factor", None) or 0
        return n_each * owner._num_workers, vars(owner)
    found = read_by_loader(frame.f_back, depth - 1) if frame and depth else (0, {})
    if found[1] and type(owner) is BatchSampler:  # torch's: it takes batches for rows
        raise TypeError("this sampler gives batches: DataLoader(batch_sampler=sampler)")
    return found


def skip_frames(*functions: Any) -> None:
    """Have dynamo leave functions uncompiled, but compile what they call.

    Only uses dynamo's C part, as dynamo is costly to import; does nothing without it.
    """
    try:
        native: Any = torch._C._dynamo.eval_frame
        if hasattr(native, "skip_code"):
            skip = native.skip_code
        else:  # torch 2.6 and newer
            action = native._FrameAction
            strategy = native._FrameExecStrategy(action.SKIP, action.DEFAULT)
            skip = functools.partial(_set_strategy, native, strategy)
    except AttributeError:
        return
    for function in functions:
        skip(function.__code__)


def _set_strategy(native: Any, strategy: Any, code: types.CodeType) -> None:
    native.set_code_exec_strategy(code, strategy)


skip_frames(
    is_compiled_autograd,
    is_in_backward,
    is_compile_used,
    _has_eval_frame_callback,
    increment_version,
    after_node,
    at_end_of_backward,
)
