"""What torch computes a module's weights by: parametrizations, and hooks of its own.

Private names of torch are used here as in ``torch_core.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_parametrize: Any = parametrize


def computes(hook: Any) -> bool:
    """Tell whether a hook is torch's own, and but computes a weight of its module."""
    if isinstance(hook, prune.BasePruningMethod):
        return type(hook).__call__ is prune.BasePruningMethod.__call__
    return type(hook) in (SpectralNorm, WeightNorm)


def name_computed(hook: Any) -> str:
    """Return the name of the weight that such a hook computes."""
    return str(hook._tensor_name if hasattr(hook, "_tensor_name") else hook.name)


def computed_by(part: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the weights that such hooks compute in each forward."""
    for hook in part._forward_pre_hooks.values():
        if computes(hook):
            yield name_computed(hook)


def is_parametrized(module: torch.nn.Module) -> bool:
    """Tell whether a module is of a class that parametrizations have made for it."""
    return "parametrizations" in module._modules and parametrize.is_parametrized(module)


def reduce_parametrized(module: torch.nn.Module) -> Any:
    """Return what pickle makes a module with parametrizations of, which refuses it."""
    kind = type(module).__bases__[0]
    names = tuple(module.parametrizations)  # type: ignore[arg-type]
    return parametrized, (kind, names), state_of(module)


def state_of(module: torch.nn.Module) -> Any:
    """Return what a module says that pickle should take of it."""
    kind = type(module).__bases__[0] if is_parametrized(module) else type(module)
    getstate = getattr(kind, "__getstate__", None)
    if getstate is None or getstate is getattr(object, "__getstate__", None):
        return dict(vars(module))
    return getstate(module)


def parametrized(kind: type, names: tuple[str, ...]) -> torch.nn.Module:
    """Return a module without state, of a class made for these parametrizations."""
    kind_of_all: Any = kind
    module: torch.nn.Module = kind_of_all.__new__(kind)
    _parametrize._inject_new_class(module)
    for name in names:
        _parametrize._inject_property(module, name)
    return module
