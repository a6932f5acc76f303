"""Who else holds the memory of parameters and of buffers.

Parameters are about to be moved into shared memory: views of the old would stay behind,
with the values of that moment.  Buffers are copied for each worker.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from paceline import _native
from paceline._compat import torch_core, torch_storage, torch_weights
from paceline._replicas.errors import UnsupportedModelError


class Buffers:
    """The memory of a model's buffers, which workers have each for themselves."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self._parts = parts
        self._names: dict[int | None, str] | None = None  # by storage

    def have_changed(self) -> None:
        """Look anew which there are, at the next question."""
        self._names = None

    def check_apart(self, tensor: torch.Tensor) -> None:
        """Raise where a tensor shares the memory of a buffer."""
        if self._names is None:
            self._names = {
                torch_storage.number_of(buffer): name
                for part in self._parts
                for name, buffer in part._buffers.items()
                if buffer is not None
            }
        number = torch_storage.number_of(tensor)
        if number is not None and number in self._names:
            raise UnsupportedModelError(
                f"a tensor of shape {tuple(tensor.shape)} shares its memory with the "
                f"buffer '{self._names[number]}', and would not in another process"
            )


def _computed(module: nn.Module) -> list[torch.Tensor]:
    """Return the weights that hooks of torch's compute anew in each forward."""
    found = [
        vars(part).get(name)
        for part in module.modules()
        for name in torch_weights.computed_by(part)
    ]
    return [value for value in found if isinstance(value, torch.Tensor)]


def reason_of(module: nn.Module) -> str | None:
    """Say who else, outside the module, holds memory that parameters would leave."""
    moving = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.numel()
        and _native.SharedMemory.holding(parameter.data_ptr()) is None
    ]
    for name, parameter in moving:
        if parameter.is_shared():  # type: ignore[no-untyped-call]
            return (
                f"'{name}' lies in memory that other processes may share "
                "(share_memory()): wrap a copy.deepcopy of the model"
            )
    in_order = sorted(moving, key=lambda item: item[1].data_ptr())
    for (name, one), (other, two) in itertools.pairwise(in_order):
        if one.data_ptr() + torch_core.extent_bytes(one) > two.data_ptr():
            return f"'{other}' and '{name}' share their memory"
    at = torch_storage.aliased([p for _, p in moving], _computed(module))
    if at is None:
        return None
    return (
        f"'{moving[at][0]}' shares its memory with another tensor or array (a state "
        "dict, a NumPy view, what it was made of): let go of that before the first "
        "forward, or wrap a copy.deepcopy of the model"
    )
