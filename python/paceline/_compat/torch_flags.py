"""Settings of torch that a process has once; see torch_core.py.

What replicas in other processes must share: each is a function that asks and one that
sets.  A torch that lacks one is asked for the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.backends.opt_einsum  # an early torch does not by itself

_C: Any = torch._C
_einsum: dict[str, Any] = vars(
    vars(torch.backends.opt_einsum).get("m", torch.backends.opt_einsum)
)  # behind properties, which take 10 us
_DOUBLE_MIN = 2.2250738585072014e-308


def _determinism() -> tuple[bool, bool]:
    return (
        _C._get_deterministic_algorithms(),
        _C._get_deterministic_algorithms_warn_only(),
    )


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _matmul_precision() -> str | None:
    try:
        precision: str = _C._get_float32_matmul_precision()
    except RuntimeError:  # set for one backend alone, it has no value for all
        return None
    return precision


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _einsum_flags() -> tuple[Any, Any]:
    return _einsum["enabled"], _einsum["strategy"]


def _set_einsum_flags(value: tuple[Any, Any]) -> None:
    _einsum["enabled"], _einsum["strategy"] = value


def flushes_denormals(smallest: float = _DOUBLE_MIN) -> bool:
    """Tell whether this thread takes denormal numbers for zero."""
    return smallest / 2.0 == 0.0


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(value: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(*value)


Pair = tuple[Callable[[], Any], Callable[[Any], Any]]


def _of_c(get: str, set_: str) -> list[Pair]:
    """Return the pair of two functions of torch's, where there are both."""
    pair = getattr(_C, get, None), getattr(_C, set_, None)
    return [pair] if all(pair) else []  # type: ignore[list-item]


def _precision_of(backend: str, operation: str) -> list[Pair]:
    """Return the pair for one of torch 2.9's settings of float32."""
    get = getattr(_C, "_get_fp32_precision_getter", None)
    set_ = getattr(_C, "_set_fp32_precision_setter", None)
    if get is None or set_ is None:
        return []
    return [(partial(get, backend, operation), partial(set_, backend, operation))]


_FLAGS: list[Pair] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_determinism, _set_determinism),
    (_matmul_precision, _set_matmul_precision),
    (_einsum_flags, _set_einsum_flags),
    (flushes_denormals, torch.set_flush_denormal),
    (_anomaly, _set_anomaly),
    *_of_c(
        "_get_deterministic_fill_uninitialized_memory",
        "_set_deterministic_fill_uninitialized_memory",
    ),
    *_of_c("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    *_of_c("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    *_of_c("_get_nnpack_enabled", "_set_nnpack_enabled"),
    *_of_c("_get_qengine", "_set_qengine"),
    *_of_c("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    *_of_c("_get_math_sdp_enabled", "_set_sdp_use_math"),
    *_of_c("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    *_of_c("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    *_of_c("_get_sdp_priority_order", "_set_sdp_priority_order"),
    *_precision_of("generic", "all"),
    *_precision_of("mkldnn", "all"),
    *_precision_of("mkldnn", "matmul"),
    *_precision_of("mkldnn", "conv"),
    *_precision_of("mkldnn", "rnn"),
]
_GETTERS = [get for get, _ in _FLAGS]


def flags() -> list[Any]:
    """Return the settings of this process, and of this thread."""
    return [get() for get in _GETTERS]


def set_flags(values: list[Any]) -> None:
    """Set what differs; torch imports its compiler, a second's work, to set some."""
    for (get, set_), value in zip(_FLAGS, values, strict=True):
        if get() != value:
            with contextlib.suppress(RuntimeError):  # as where it was set
                set_(value)
