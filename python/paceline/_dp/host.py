"""The CPU, asked for what a machine is asked for its GPUs: see ``_gpu.Machine``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline._dp.devices import CPU


class Cpu:
    """The CPU, as often as there are replicas: all has happened when a call returns."""

    device_type = "cpu"

    def index_of_tensor(self, tensor: torch.Tensor, expected: int) -> int | None:
        """Return `expected` for what is on the CPU."""
        return expected if tensor.is_cpu else None

    def device(self, index: int) -> torch.device:
        """Return the CPU as torch names it."""
        return CPU

    def current(self) -> int:
        """Return the number of the CPU."""
        return 0

    def current_stream(self, index: int) -> Any:
        """Return nothing: there are no streams."""

    def on(self, index: int, stream: Any) -> AbstractContextManager[Any]:
        """Return what changes nothing."""
        return nullcontext()

    def synchronize(self) -> None:
        """Return at once."""

    def is_capturing(self) -> bool:
        """Tell that no graph is captured."""
        return False

    def generator_state(self, index: int) -> Any:
        """Return nothing: the CPU's generator is the process's."""


HOST = Cpu()
