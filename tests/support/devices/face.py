"""The Python side of the devices: the functions that torch calls on `torch.gpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from support.devices import native

_initialized = True  # a checkpoint reads this before it keeps a device's generator


def _is_in_bad_fork() -> bool:
    return False


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return native.visible


def current_device() -> int:
    return native.library.devices_current()


def set_device(device: Any) -> None:
    native.library.devices_set_current(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Make a device the thread's current one."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: Any = None) -> None:
    """Return at once: each call does its work before it returns."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed_all(seed: int) -> None:
    for generator in native.generators:
        generator.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return native.generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    native.generators[_index(device)].set_state(state)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
