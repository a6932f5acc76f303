"""The constructor's arguments, checked once and frozen."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from paceline import _environment, _native
from paceline._compat import torch_core, torch_groups
from paceline._ddp import forks
from paceline._ddp.mixed_precision import Precision

MIB = 1 << 20
VIEW_BYTES = 32 * 1024
"""Gradients of at least this size become views of their buckets: reducer/step.h."""


@dataclass(frozen=True)
class Caps:
    """Size limits of buckets, in bytes."""

    bucket_bytes: int
    last_bytes: int  # of the bucket that fills last
    # Each bucket's, in the order of filling, instead of the two; the last repeats.
    each: tuple[int, ...] = ()


DEFAULT_CAPS = Caps(1 * MIB, MIB // 4)
"""Small enough to be summed in cache and sent early; nothing hides the last bucket."""
DEFAULT_NETWORK_CAPS = Caps(25 * MIB, 1 * MIB)
"""torch's: suits collectives of a process group, since each call costs."""


@dataclass(frozen=True)
class Options:
    """The options of a DistributedDataParallel."""

    group: dist.ProcessGroup
    sync_buffers: bool  # send rank 0's with each synchronised step
    sync_at_start: bool  # copy rank 0's parameters and buffers
    sync_buffers_at_start: bool  # or the parameters only
    as_bucket_views: bool  # on a GPU, and if a backward finds a gradient
    caps: Caps = DEFAULT_CAPS  # of buckets summed in shared memory
    network_caps: Caps = DEFAULT_NETWORK_CAPS  # if a hook or group carries them
    strict: bool = False  # refuse what torch refuses
    precision: Precision | None = None  # of forwards and averages, if mixed
    is_manual: bool = False  # finalize_backward() ends a step, not its backward

    def __post_init__(self) -> None:
        forks.note(self.group)

    @property
    def cap_mb(self) -> float | list[float] | None:
        """The argument ``bucket_cap_mb``, or its list."""
        caps = self.network_caps
        if (self.caps, caps) == (DEFAULT_CAPS, DEFAULT_NETWORK_CAPS):
            return None
        return [n / MIB for n in caps.each] or caps.bucket_bytes / MIB

    def caps_of(self, *, is_by_group: bool, is_on_gpu: bool) -> Caps:
        """Return the caps that suit the carrier of the gradients."""
        if not is_on_gpu:
            return self.network_caps if is_by_group else self.caps
        caps = self.network_caps  # NCCL's, except that the last bucket is small
        last_bytes = min(caps.last_bytes, DEFAULT_NETWORK_CAPS.last_bytes)
        return Caps(caps.bucket_bytes, last_bytes, caps.each)

    @property
    def staying(self) -> dict[str, bool]:
        """Whether frozen parameters, or buffers, are never sent, and so may differ."""
        at_start = self.sync_at_start and self.sync_buffers_at_start
        return {
            "frozen": not self.sync_at_start,
            "buffers": not (self.sync_buffers or at_start),
        }

    def view_bytes(self, is_on_gpu: bool) -> int:
        """Return the size from which gradients become views of their buckets.

        On the CPU a view that is kept keeps its values.  On a GPU the next step writes
        it, as with torch's class, so there views must be asked for.
        """
        return VIEW_BYTES if self.as_bucket_views or not is_on_gpu else sys.maxsize


def read(
    group: dist.ProcessGroup,
    *,
    bucket_cap_mb: float | None,
    bucket_cap_mb_list: Sequence[float] | None,
    sync_buffers: tuple[bool | None, bool | None],
    sync_at_start: bool,
    mixed_precision: Any,
    strict: bool | None,
    accumulate_in_fp32: bool,
    gradient_as_bucket_view: bool,
) -> tuple[Options, Exception | None]:
    """Return the options, and an error in them: sent to all ranks, not raised.

    If one rank raised here, the others would wait for it.
    """
    newer_first = reversed(sync_buffers)
    options = Options(
        group=group,
        sync_buffers=bool(next((v for v in newer_first if v is not None), True)),
        sync_at_start=bool(sync_at_start),
        sync_buffers_at_start=sync_buffers != (False, None),
        as_bucket_views=bool(gradient_as_bucket_view),
    )
    try:
        if mixed_precision is not None and mixed_precision is not False:
            precision = Precision.of(mixed_precision)
            options = dataclasses.replace(options, precision=precision)
        caps, network_caps = _read_caps(bucket_cap_mb, bucket_cap_mb_list)
        options = dataclasses.replace(options, caps=caps, network_caps=network_caps)
        if strict is None:
            strict = _environment.is_strict()
        if strict not in (True, False):
            raise TypeError(f"strict is {strict!r}: give True, False or None")
        if accumulate_in_fp32:
            raise NotImplementedError(
                "accumulate_in_fp32 is gone: give mixed_precision=torch.nn.parallel."
                "distributed._MixedPrecision(reduce_dtype=torch.float32), which "
                "averages 16-bit gradients in float32"
            )
    except (NotImplementedError, TypeError, ValueError) as problem:
        return options, problem
    return dataclasses.replace(options, strict=bool(strict)), None


def read_group(process_group: Any, device_mesh: Any) -> dist.ProcessGroup:
    """Return the group that the two arguments name."""
    if device_mesh is None:
        if process_group is None:
            try:
                return torch_groups.default_group()
            except ValueError as error:
                raise ValueError(
                    f"{error} paceline.init() does it, before the model is wrapped, in "
                    "a script that `paceline run -n 2 train.py` or a launcher starts"
                ) from None
        if not torch_groups.is_group_or_token(process_group):
            raise TypeError(
                f"process_group is {process_group!r}: give a group of "
                "torch.distributed.new_group(), or None"
            )
        if torch_groups.group_rank(process_group) < 0:
            raise ValueError(
                "process_group does not have this rank (new_group() gave it a token): "
                "wrap the model on the group's own ranks only"
            )
        group: dist.ProcessGroup = process_group
        return group
    if process_group is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments."
        )
    if not hasattr(device_mesh, "ndim"):
        raise TypeError(
            f"device_mesh is {device_mesh!r}: give a torch.distributed.DeviceMesh, or "
            "None"
        )
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    group = device_mesh.get_group(mesh_dim=0)
    return group


def _read_caps(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> tuple[Caps, Caps]:
    """Return the caps of buckets in shared memory, and of those on a network.

    As in torch, the list overrides the number.
    """
    if bucket_cap_mb_list and not isinstance(bucket_cap_mb_list, Iterable):
        raise TypeError(
            f"bucket_cap_mb_list is {bucket_cap_mb_list!r}: give a list of mebibytes"
        )
    if bucket_cap_mb_list:
        each = tuple(_cap_bytes("bucket_cap_mb_list", mb) for mb in bucket_cap_mb_list)
        caps = Caps(max(each), max(each), each)
        return caps, caps
    if bucket_cap_mb is None:
        return DEFAULT_CAPS, DEFAULT_NETWORK_CAPS
    n_bytes = _cap_bytes("bucket_cap_mb", bucket_cap_mb)
    return (
        Caps(n_bytes, min(n_bytes, DEFAULT_CAPS.last_bytes)),
        Caps(n_bytes, n_bytes),
    )


def _cap_bytes(name: str, mebibytes: float) -> int:
    try:
        wanted = float(mebibytes) * MIB
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} is or has {mebibytes!r}: give a number of mebibytes"
        ) from None
    if not 1 <= wanted < 2**62:
        raise ValueError(
            f"{name} is {mebibytes}: give the mebibytes of a bucket, as in "
            f"{name}={'[25]' if name.endswith('list') else 25}, or None"
        )
    return int(wanted)


def check_delayed(named: Any, hooked: Any) -> None:
    """Raise if only one of the two arguments for delayed gradients is given."""
    if (named is None) != (hooked is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set "
            "at the same time."
        )


def warn_of_deprecated(
    check_reduction: bool,
    broadcast_buffers: bool | None,
    forward_sync_buffers: bool | None,
) -> None:
    """Warn, as torch does, of an argument without effect and of a renamed one."""
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is "
            "deprecated. Please avoid using it.",
            FutureWarning,
            stacklevel=3,
        )
    if broadcast_buffers is None or not torch_core.has_buffer_property():
        return
    if forward_sync_buffers is not None:
        text = (
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. "
            "`broadcast_buffers` is deprecated and its value is ignored when "
            "`forward_sync_buffers` is provided."
        )
    else:
        text = (
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. "
            "IMPORTANT: unlike `broadcast_buffers=False`, `forward_sync_buffers=False` "
            "still syncs buffers at init. If you rely on buffers NOT being synced at "
            "init (e.g. rank-local buffers), keep using `broadcast_buffers=False`."
        )
    warnings.warn(text, FutureWarning, stacklevel=3)


def raise_first_difference(options: list[dict[str, str]]) -> None:
    """Raise, alike on every rank, if options that must agree differ.

    `options` is indexed by rank.
    """
    for rank, theirs in enumerate(options):
        for name, first in options[0].items():
            if theirs.get(name) != first:
                raise _native.MismatchError(
                    f"{name} differs: rank 0 was given {first}, rank {rank} was "
                    f"given {theirs.get(name)}; give every rank the same"
                )
