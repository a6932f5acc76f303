"""Makes a test that was written for a GPU a rank run with its models on the CPU.

Devices are all that changes: `.cuda()`, `.to(rank)` and `device=rank` give the CPU,
`device_ids` are left out, and decorators that ask for GPUs are taken off.  Whether a
test still means something then, torch's own class says: it has to pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

_FACTORIES = (
    "arange empty eye full linspace ones rand randint randn randperm tensor zeros",
    "empty_like full_like ones_like rand_like randint_like randn_like zeros_like",
)


def on_cpu(device: Any) -> Any:
    """Return the CPU for a GPU; anything else, such as a dtype, as it is."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    is_index = isinstance(device, int) and not isinstance(device, bool)
    return CPU if is_index else device


def _place_result(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return factory


def _place_all(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        places = {name: on_cpu(value) for name, value in kwargs.items()}
        return method(self, *map(on_cpu, args), **places)

    return to


def _without_devices(constructor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        constructor(self, *args, **kwargs)

    return __init__


def _small(ones: Callable[..., Any]) -> Callable[..., Any]:
    """Make an image of 1000 by 1000 one of 32 by 32: a CPU has not all day."""

    def small(*size: Any, **kwargs: Any) -> Any:
        return ones(
            *(size[:2] + (32, 32) if size[2:] == (1000, 1000) else size), **kwargs
        )

    return small


class _BatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """In SyncBatchNorm's place, which has no kernels for the CPU."""

    def _check_input_dim(self, _: torch.Tensor) -> None:
        pass

    @staticmethod
    def convert_sync_batchnorm(module: torch.nn.Module, *_: Any) -> torch.nn.Module:
        return module


class _Stream(contextlib.nullcontext[Any]):
    """A stream of a device that has none, or an event: all is done at once."""

    def wait_stream(self, _: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def wait(self, stream: Any) -> None:
        pass


def install(wrapper: Any, n_ranks: int) -> None:
    """Put the CPU in place of GPUs in this process, for good.

    Parameters
    ----------
    wrapper : type
        The DistributedDataParallel that the test will make.
    n_ranks : int
        So many GPUs are said to be there.
    """
    torch.ones = _small(torch.ones)  # type: ignore[assignment]
    for name in " ".join(_FACTORIES).split():
        setattr(torch, name, _place_result(getattr(torch, name)))
    torch.Tensor.to = _place_all(torch.Tensor.to)  # type: ignore[method-assign]
    torch.nn.Module.to = _place_all(torch.nn.Module.to)  # type: ignore[method-assign]
    # A copy to another device shares nothing with its source.
    torch.Tensor.cuda = (  # type: ignore[method-assign]
        lambda self, *_, **__: self.clone()
    )
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore
    torch.cuda.set_device = lambda *_: None
    torch.cuda.synchronize = lambda *_, **__: None
    if hasattr(torch, "accelerator"):
        torch.accelerator.current_stream = lambda *_: _Stream()  # type: ignore
    torch.Stream = torch.Event = _Stream  # type: ignore
    torch.cuda.current_stream = lambda *_: _Stream()  # type: ignore
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: n_ranks
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore
    torch.nn.SyncBatchNorm = _BatchNorm  # type: ignore
    wrapper.__init__ = _without_devices(wrapper.__init__)


def bare(test: Callable[..., None]) -> Callable[..., None]:
    """Return a test without what skips it; one that runs it at debug levels stays."""
    levels = None
    while hasattr(test, "__wrapped__"):
        free = test.__code__.co_freevars
        if "levels" in free:
            levels = test.__closure__[free.index("levels")].cell_contents  # type: ignore
        test = test.__wrapped__
    if levels is None:
        return test
    from torch.testing._internal.common_distributed import with_dist_debug_levels

    return with_dist_debug_levels(levels)(test)  # type: ignore[no-any-return]
