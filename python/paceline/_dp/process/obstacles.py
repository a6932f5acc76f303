"""What stands against replicas in other processes: for good, or while it lasts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from paceline._compat import torch_core, torch_weights
from paceline._dp.process import holders
from paceline._replicas.errors import CannotTravelError, ThisCallError

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
GLOBAL_HOOKS = "hooks are registered for all modules"


def obstacle(
    module: torch.nn.Module, is_first: bool = True
) -> CannotTravelError | None:
    """Return the error that says why a module cannot have such replicas, or None.

    Hooks come and go, and so do parameters that `functional_call` puts in: those are
    obstacles to this call alone.
    """
    reason = reason_against(module, is_first)
    if reason is None:
        return None
    passes = (
        torch_core.has_global_hooks()
        or any(map(_has_hooks, module.modules()))
        or not all(parameter.is_leaf for parameter in module.parameters())
    )
    return (ThisCallError if passes else CannotTravelError)(reason)


def reason_against(module: nn.Module, is_first: bool = True) -> str | None:
    """Say why a module cannot have replicas in other processes, or None.

    Parts of one tensor may be parameters from the second time on, for the sake of
    ``vector_to_parameters``.
    """
    if torch_core.has_global_hooks():
        return GLOBAL_HOOKS
    for name, part in module.named_modules():
        which = f"'{name}' ({type(part).__name__})"
        if _has_hooks(part):
            return f"{which} has hooks, whose side effects belong in this process"
        if isinstance(part, torch.jit.ScriptModule):
            return f"{which} is a ScriptModule"
    for name, tensor in _named_tensors(module):
        if torch_core.is_lazy(tensor):
            return f"'{name}' has no shape yet"
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return f"'{name}' is a {tensor.layout} tensor on {tensor.device}"
        if tensor.is_conj() or tensor.is_neg():
            return f"'{name}' is a conjugate or negative view"
    for name, parameter in module.named_parameters():
        if not parameter.is_leaf:
            return f"'{name}' is computed from other tensors (functional_call)"
    for name, buffer in module.named_buffers():
        if buffer.requires_grad:
            return f"buffer '{name}' requires a gradient"
    reason = _reason_of_aliases(module) if is_first else None
    return reason or holders.reason_of(module)


def _has_hooks(part: nn.Module) -> bool:
    """Tell whether a module has hooks that do not just compute its own weights."""
    return any(
        not (
            hooks == "_forward_pre_hooks"
            and all(map(torch_weights.computes, live.values()))
        )
        for hooks in _HOOKS
        if (live := getattr(part, hooks, None))
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _reason_of_aliases(module: nn.Module) -> str | None:
    """Say what shares memory with a parameter, which is about to be moved."""
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    others: list[tuple[str, torch.Tensor]] = list(module.named_buffers())
    for prefix, part in module.named_modules():
        computed = set(torch_weights.computed_by(part))
        others += [
            (f"{prefix}.{name}", value)
            for name, value in vars(part).items()
            if isinstance(value, torch.Tensor) and name not in computed
        ]
    for name, tensor in [*module.named_parameters(), *others]:
        if tensor.layout != torch.strided or tensor.numel() == 0:
            continue
        is_parameter = isinstance(tensor, nn.Parameter)
        where = tensor.untyped_storage().data_ptr()
        if is_parameter:
            _, other = owners.setdefault(where, (name, tensor))
        else:
            _, other = owners.get(where, (name, tensor))
        if other is not tensor:
            return f"'{name}' and '{owners[where][0]}' share their memory"
    return None
