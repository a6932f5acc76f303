"""What stands against replicas in other processes: for good, or while it lasts."""

from __future__ import annotations

import torch
from torch import nn

from paceline._compat import torch_core, torch_weights
from paceline._dp.process import holders
from paceline._replicas.errors import UnsupportedCallError, UnsupportedModelError

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
GLOBAL_HOOKS = "hooks are registered for all modules"


def obstacle(module: nn.Module, is_first: bool = True) -> UnsupportedModelError | None:
    """Return the error that says why a module cannot have such replicas, or None.

    Parts of one tensor may be parameters from the second time on, for the sake of
    ``vector_to_parameters``.
    """
    reason = _reason_for_now(module)
    if reason is not None:
        return UnsupportedCallError(reason)
    reason = _reason_for_good(module)
    if reason is None and is_first:
        reason = _reason_of_aliases(module)
    reason = reason or holders.reason_of(module)
    return UnsupportedModelError(reason) if reason is not None else None


def _reason_for_now(module: nn.Module) -> str | None:
    """Say what stands against this call alone: it comes and goes."""
    if torch_core.has_global_hooks():
        return GLOBAL_HOOKS
    reason = of_hooks(module)
    if reason is not None:
        return reason
    for name, parameter in module.named_parameters():
        if not parameter.is_leaf:
            return f"'{name}' is computed from other tensors (functional_call)"
    return None


def of_hooks(module: nn.Module) -> str | None:
    """Say which part of a module has hooks, if one has."""
    for name, part in module.named_modules():
        if _has_hooks(part):
            which = f"'{name}' ({type(part).__name__})"
            return f"{which} has hooks, whose side effects belong in this process"
    return None


def _reason_for_good(module: nn.Module) -> str | None:
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            return f"'{name}' ({type(part).__name__}) is a ScriptModule"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch_core.is_lazy(tensor):
            return f"'{name}' has no shape yet"
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return f"'{name}' is a {tensor.layout} tensor on {tensor.device}"
        if tensor.is_conj() or tensor.is_neg():
            return f"'{name}' is a conjugate or negative view"
    for name, buffer in module.named_buffers():
        if buffer.requires_grad:
            return f"buffer '{name}' requires a gradient"
    return None


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
