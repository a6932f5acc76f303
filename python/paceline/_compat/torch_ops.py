"""Operators of torch, and where they are from; see torch_core.py."""

from __future__ import annotations

from typing import Any

import torch
from torch._library import custom_ops as _custom_ops

_CustomOperator: Any = _custom_ops.CustomOpDef


def find_operator(name: str, overload: str | None) -> Any:
    """Return the operator of a name; `overload` None: all of them, as one."""
    namespace, _, packet = name.partition("::")
    found = getattr(torch.ops, namespace)
    if packet:
        found = getattr(found, packet)
    return found if overload is None else getattr(found, overload)


def find_custom_operator(name: str) -> Any:
    """Return what ``torch.library.custom_op`` has returned for a name."""
    if name not in _custom_ops.OPDEFS:
        raise LookupError(f"the operator {name} is defined in another process alone")
    return _custom_ops.OPDEFS[name]


def reduce_operator(value: Any) -> Any:
    """Say how an operator is found in another process; None for all else."""
    ops = torch._ops
    if isinstance(value, ops.OpOverload):
        return find_operator, (value._schema.name, value._overloadname)
    if isinstance(value, ops.OpOverloadPacket):
        return find_operator, (value._qualified_op_name, None)
    if isinstance(value, ops._OpNamespace):
        return find_operator, (value.name, None)
    if isinstance(value, _CustomOperator):
        return find_custom_operator, (value._qualname,)
    return None


def loaded_libraries() -> list[str]:
    """Return the files that define operators and were loaded by this process."""
    return sorted(torch.ops.loaded_libraries)


def load_library(file: str) -> None:
    """Load the operators of a file, unless that was done."""
    if file not in torch.ops.loaded_libraries:
        torch.ops.load_library(file)  # type: ignore[no-untyped-call]
