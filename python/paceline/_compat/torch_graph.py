"""Probes of torch during a backward: which nodes run, and what vmap has wrapped.

There are two vmaps: that of ``torch.func``, and an older one, which implements
``is_grads_batched=True``.  With both, one tensor stands for a batch of tensors.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.nn.parallel import distributed
from torch.nn.utils import stateless
from torch.utils import checkpoint

from paceline._compat import torch_modes

_C: Any = torch._C
_distributed: Any = distributed
_stateless: Any = stateless
_old_vmap: Any = torch
_new_vmap: Any = _C._functorch
_OLD, _NEW = [_C._parse_dispatch_key(name) for name in ("Batched", "FuncTorchBatched")]


def will_run(node: Any, is_returned: bool = True) -> bool:
    """Tell, inside a backward, whether the engine will run a node.

    torch raises for a leaf whose gradient the backward returns; the answer is then
    ``is_returned``.
    """
    try:
        return bool(_C._will_engine_execute_node(node))
    except RuntimeError:
        return is_returned


def renew_engine() -> None:
    """Have torch make autograd's engine anew, if this process was forked.

    Otherwise the next operator that records a graph does it, without a lock: if two
    threads are in it at once, the process crashes (seen with torch 2.13 and 2.15).
    """
    torch.autograd.Variable._execution_engine.is_checkpoint_valid()


AT_ONCE = 2**62
"""The turn of a node that runs before all other ready nodes; see set_turn()."""


def set_turn(node: Any, turn: int) -> None:
    """Have a backward run a node before all ready nodes with a lower number.

    By default, each thread numbers nodes in the order of creation; 0 runs last.
    """
    node._set_sequence_nr(turn)


# Made now, so that modes which watch operations see no new tensor later.  While one is
# out of the list, a single thread uses it.
_holders: list[Any] = [torch.empty(0, device="cpu") for _ in range(8)]


def call_in_backward(
    tensors: Sequence[torch.Tensor], hooks: dict[int, Callable[[Any], object]]
) -> bool:
    """Have backwards call these hooks at each tensor in a graph; tell if there are any.

    Tensors share the dict.  A hook of each tensor would cost a handle, and torch would
    warn whenever the tensor is pickled.  A hook's argument means nothing: it is the
    gradient of any output of the node, or None.
    """
    nodes = [node for tensor in tensors if (node := tensor.grad_fn) is not None]
    if nodes:
        try:
            holder = _holders.pop()
        except IndexError:  # many threads at once
            holder = torch.empty(0, device="cpu")
        try:
            holder._backward_hooks = hooks
            for node in nodes:
                node._register_hook_dict(holder)
        finally:
            holder._backward_hooks = None
            _holders.append(holder)
    return bool(nodes)


def is_functional_call(module: torch.nn.Module) -> bool:
    """Tell whether this thread runs ``module`` inside ``functional_call``."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _stateless._functional_call.__code__:
            called = frame.f_locals.get("module")
            if called is not None and any(part is module for part in called.modules()):
                return True
        frame = frame.f_back
    return False


def checkpoints() -> Iterator[Any]:
    """Yield the checkpoints that this call is in, from the innermost.

    Each is an object that stays the same when a backward repeats the call: a
    checkpoint's own record, or the context of a ``torch.autograd.Function``.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code, found = frame.f_code, None
        if code.co_filename == checkpoint.__file__:
            held = frame.f_locals
            generator = getattr(held.get("gen"), "gi_frame", None)  # of checkpoint()
            outer = held if generator is None else generator.f_locals
            found = outer.get("new_frame", outer.get("frame"))
        if code.co_name in ("forward", "backward") and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            found = first if isinstance(first, FunctionCtx) else found
        if found is not None:
            yield found
        frame = frame.f_back


def exchange_before_recomputing(call: Any) -> Any:
    """Set a function for checkpoints made in this thread; return the previous one.

    A backward calls it before it computes the checkpoint's part again.  It may have
    reached none of the outputs by then.
    """
    _replace_checkpoints()
    before = getattr(_made_here, "call", None)
    _made_here.call = call
    return before


_made_here = threading.local()


def _after_call(function: Any) -> Any:
    call = getattr(_made_here, "call", None)
    if call is None:
        return function

    def recompute(*args: Any, **kwargs: Any) -> Any:
        if _C._current_autograd_node() is not None:
            call()
        return function(*args, **kwargs)

    return recompute


@functools.cache
def _replace_checkpoints() -> None:
    """Replace two methods of torch; while no function is set, they do the same."""
    reentrant: Any = checkpoint.CheckpointFunction
    other: Any = checkpoint._CheckpointFrame
    forward, construct = reentrant.forward, other.__init__
    reentrant.forward = staticmethod(
        lambda ctx, function, *args: forward(ctx, _after_call(function), *args)
    )
    other.__init__ = lambda self, function, *args, **kwargs: construct(
        self, _after_call(function), *args, **kwargs
    )


_is_rpc_used = getattr(
    getattr(_C, "_distributed_rpc", None), "_is_current_rpc_agent_set", None
)


current_task: Callable[[], int] = _C._current_graph_task_id
"""Return the number of the backward that runs in this thread, or -1."""


def is_rpc_used() -> bool:
    """Tell whether ``torch.distributed.rpc`` was initialised in this process."""
    return _is_rpc_used is not None and _is_rpc_used()


def current_context() -> int | None:
    """Return this thread's context of ``torch.distributed.autograd``, or None."""
    try:
        return int(_C._distributed_autograd._current_context()._context_id())
    except RuntimeError:
        return None


def gradients_in(context: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients in a context of ``torch.distributed.autograd``, if alive."""
    try:
        return dict(_C._distributed_autograd.get_gradients(context))
    except RuntimeError:
        return {}


def is_forward_mode() -> bool:
    """Tell whether forward-mode differentiation is on: tensors may have tangents."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def is_transformed() -> bool:
    """Tell whether tensors may carry more than values, as under vmap."""
    return is_forward_mode() or torch_modes.has_transform()


def is_batched(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor stands for a batch, under the old or the new vmap."""
    keys = _C._dispatch_keys(tensor)
    return any(key is not None and keys.has(key) for key in (_OLD, _NEW))


class Batch:
    """Tensors, some of them batched, split along the innermost vmap's dimension."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        levels = [
            _new_vmap.maybe_get_level(t)
            for t in tensors
            if t is not None and _C._dispatch_keys(t).has(_NEW)
        ]
        self._vmap = _new_vmap if levels else _old_vmap
        self._level = max(levels) if levels else _old_level()
        # A tensor that is not batched becomes a stack of one, and is expanded below.
        stacks = [None if t is None else self._take_off(t) for t in tensors]
        self._size = max((len(t) for t in stacks if t is not None), default=0)
        self._stacks = [
            None if t is None else t.expand(self._size, *t.shape[1:]) for t in stacks
        ]

    def _take_off(self, tensor: torch.Tensor) -> torch.Tensor:
        stack: torch.Tensor = self._vmap._remove_batch_dim(tensor, self._level, 1, 0)
        return stack

    def rows(self) -> list[tuple[torch.Tensor | None, ...]]:
        """Return the tensors of each element of the batch."""
        return [
            tuple(None if stack is None else stack[i] for stack in self._stacks)
            for i in range(self._size)
        ]

    def join(self, column: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return one batched tensor of the results of all rows, or None."""
        example = next((t for t in column if t is not None), None)
        if example is None:
            return None
        zero = torch.zeros_like(example)
        stack = torch.stack([zero if t is None else t for t in column])
        batched: torch.Tensor = self._vmap._add_batch_dim(stack, 0, self._level)
        return batched


def _old_level() -> int:
    """Return the nesting depth of the older vmap."""
    level = int(_C._vmapmode_increment_nesting()) - 1
    _C._vmapmode_decrement_nesting()
    return level


def output_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors that torch's class finds in a forward's output."""
    return list(_distributed._find_tensors(output))


def mask_of_shown(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> bytes:
    """Return one byte per leaf: whether the graph of `outputs` contains it."""
    found = {id(output) for output in outputs if output.is_leaf}
    found |= {id(getattr(node, "variable", None)) for node in _nodes_behind(outputs)}
    return bytes(id(leaf) in found for leaf in leaves)


def edges_to(leaf: torch.Tensor, outputs: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """Yield each node that returns a gradient for a leaf, and which one it is."""
    for node in _nodes_behind([o for o in outputs if isinstance(o, torch.Tensor)]):
        for i, (following, _) in enumerate(node.next_functions):
            if getattr(following, "variable", None) is leaf:
                yield node, i


def _nodes_behind(outputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield each node of the graph of `outputs` once."""
    seen: set[Any] = set()
    nodes = [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [following for following, _ in node.next_functions]
