"""DataParallel as a function, for one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from paceline._dp.data_parallel import DataParallel

_engines: Any = WeakIdKeyDictionary()
"""Of each module that ``data_parallel`` ran: threads, what it draws, if it waits."""


def data_parallel(
    module: torch.nn.Module,
    inputs: Any,
    device_ids: Sequence[int | str | torch.device] | None = None,
    output_device: int | str | torch.device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a module on parts of a batch, once.

    The functional form of :class:`paceline.DataParallel`.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    inputs : object
        A tuple of positional arguments, one argument, or None for no arguments.
    device_ids, output_device, dim
        As for :class:`paceline.DataParallel`.
    module_kwargs : dict, optional
        Keyword arguments.

    Returns
    -------
    object
        The module's output for the whole batch.

    Examples
    --------
    >>> import paceline, torch
    >>> double = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.constant_(double.weight, 2.0)
    >>> with torch.no_grad():
    ...     paceline.data_parallel(double, torch.ones(3, 1), ["cpu", "cpu"])
    tensor([[2.],
            [2.],
            [2.]])
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    wrapper = DataParallel(module, device_ids, output_device, dim)
    engine = _engines.pop(module, None)  # a call beside this one makes its own
    if engine is not None and engine.is_cpu != wrapper._are_gpus:
        wrapper._engine = engine
    try:
        return wrapper(*inputs, **(module_kwargs or {}))
    finally:
        if wrapper._engine is not None:
            wrapper._engine.forget_model()
            _engines[module] = wrapper._engine
