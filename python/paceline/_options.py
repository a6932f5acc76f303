"""The constructor's arguments, checked once and frozen."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from paceline import _native, _torch

MIB = 1 << 20
DEFAULT_BUCKET_BYTES = 1 * MIB
"""Small enough to be summed while it is in cache, and to be on its way early."""
DEFAULT_LAST_BYTES = MIB // 4
"""The bucket that fills last is hidden by nothing."""
VIEW_BYTES = 32 * 1024
"""Gradients from this size on become views of shared memory; csrc/python/grads.h."""


@dataclass(frozen=True)
class Options:
    """What a DistributedDataParallel was asked to be.

    Attributes
    ----------
    group : torch.distributed.ProcessGroup
        The ranks.
    sync_buffers : bool
        Whether rank 0's buffers are sent with each synchronised step.
    sync_at_start : bool
        Whether rank 0's parameters and buffers are sent, and models compared, at once.
    bucket_bytes, last_bytes : int
        Caps of a bucket, and of the one that fills last, in bytes.
    """

    group: dist.ProcessGroup
    sync_buffers: bool
    sync_at_start: bool
    bucket_bytes: int
    last_bytes: int


def read(
    group: dist.ProcessGroup,
    *,
    bucket_cap_mb: float | None,
    sync_buffers: tuple[bool | None, bool | None],
    sync_at_start: bool,
    unsupported: dict[str, Any],
) -> tuple[Options, Exception | None]:
    """Return the options, and what is wrong with them: told to all ranks, not raised.

    A rank that raised here, alone, would leave the others waiting for it.
    """
    error: Exception | None = None
    bucket_bytes, last_bytes = DEFAULT_BUCKET_BYTES, DEFAULT_LAST_BYTES
    try:
        refuse_unsupported(unsupported)
        bucket_bytes, last_bytes = read_bucket_bytes(bucket_cap_mb)
    except (NotImplementedError, TypeError, ValueError) as problem:
        error = problem
    options = Options(
        group=group,
        sync_buffers=read_sync_buffers(*sync_buffers),
        sync_at_start=bool(sync_at_start),
        bucket_bytes=bucket_bytes,
        last_bytes=last_bytes,
    )
    return options, error


def read_group(process_group: Any, device_mesh: Any) -> dist.ProcessGroup:
    """Return the group that the two arguments name.

    Raises
    ------
    RuntimeError
        If both are given, or the mesh has more than one dimension.
    NotImplementedError
        If the mesh is a slice of a larger one.
    ValueError
        If neither is given and there is no default group, or this rank is not in the
        group.
    """
    if device_mesh is None:
        if process_group is None:
            return _torch.default_group()
        if dist.get_rank(process_group) < 0:
            raise ValueError(
                "process_group does not have this rank (new_group() gave it a token): "
                "wrap the model on the group's own ranks only"
            )
        given: dist.ProcessGroup = process_group
        return given
    if process_group is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments."
        )
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    root = getattr(device_mesh, "_get_root_mesh", lambda: device_mesh)()
    if root != device_mesh:
        raise NotImplementedError(
            "device_mesh is a slice of a larger mesh (data and tensor parallelism "
            "together): this version of paceline takes a whole 1-D mesh"
        )
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def read_bucket_bytes(bucket_cap_mb: float | None) -> tuple[int, int]:
    """Return the caps in bytes of a bucket and of the last bucket.

    Raises
    ------
    ValueError
        If ``bucket_cap_mb`` is not positive.
    """
    if bucket_cap_mb is None:
        return DEFAULT_BUCKET_BYTES, DEFAULT_LAST_BYTES
    wanted = float(bucket_cap_mb) * MIB
    if not 1 <= wanted < 2**62:
        raise ValueError(
            f"bucket_cap_mb is {bucket_cap_mb}: give the mebibytes of a bucket, as in "
            "bucket_cap_mb=25, or None"
        )
    n_bytes = int(wanted)
    return n_bytes, min(n_bytes, DEFAULT_LAST_BYTES)


def read_sync_buffers(
    broadcast_buffers: bool | None, forward_sync: bool | None
) -> bool:
    """Return whether buffers are synchronised; the newer argument wins."""
    for value in (forward_sync, broadcast_buffers):
        if value is not None:
            return bool(value)
    return True


def refuse_unsupported(arguments: dict[str, Any]) -> None:
    """Raise for arguments that are not there yet.

    Raises
    ------
    NotImplementedError
        Naming the argument and its value.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{name}={value!r} is not supported by this version of paceline; leave "
                "it out"
            )


def warn_of_deprecated(check_reduction: bool) -> None:
    """Warn as torch does for an argument without effect."""
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is "
            "deprecated. Please avoid using it.",
            FutureWarning,
            stacklevel=3,
        )


def raise_first_difference(told: list[dict[str, Any]]) -> None:
    """Raise where ranks were given different options.

    Parameters
    ----------
    told : list of dict
        Every rank's options that must agree, by rank.

    Raises
    ------
    paceline.MismatchError
        The same on every rank; returns where there is no difference.
    """
    for rank, theirs in enumerate(told):
        for name, first in told[0].items():
            if theirs[name] != first:
                raise _native.MismatchError(
                    f"{name} differs: rank 0 was given what makes {first}, rank {rank} "
                    f"what makes {theirs[name]}; give every rank the same"
                )
