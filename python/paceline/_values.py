"""``paceline.mean()`` and ``paceline.gather()``: what all ranks have, on every rank."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from paceline import _messages
from paceline._compat import torch_core, torch_groups
from paceline._errors import MismatchError

_Key = TypeVar("_Key")


@overload
def mean(x: torch.Tensor, *, weight: float | None = None) -> torch.Tensor: ...
@overload
def mean(x: float, *, weight: float | None = None) -> float: ...
@overload
def mean(x: Mapping[_Key, Any], *, weight: float | None = None) -> dict[_Key, Any]: ...
@torch_core.uncompiled
def mean(x: Any, *, weight: float | None = None) -> Any:
    """Return the mean over ranks of a number or a tensor, or of each in a dict.

    All ranks must call it together, each with its own value; all get the same result.
    A plain single process needs no process group.

    Parameters
    ----------
    x : real number, dense tensor of real numbers, or dict of these
        The same kind, shape and dtype on every rank.
    weight : float, optional
        How much this rank's value counts, such as the number of rows that it is the
        mean of.  A value with the weight 0 does not count, even if it is NaN.  By
        default all ranks count alike.

    Returns
    -------
    float, torch.Tensor or dict
        A number gives a float.  A tensor gives a new one on its device, without an
        autograd graph, of the dtype of ``x / 2``: the same for floating-point tensors,
        torch's default dtype for others.  Sums are float64 and rounded once at the end.

    Raises
    ------
    TypeError, paceline.MismatchError
        If `x` is something else; on every rank, if names, shapes or dtypes differ, or
        if not all ranks give a weight.
    ValueError
        If `weight` is negative, infinite or NaN, or 0 on every rank.  In a rank
        (``WORLD_SIZE`` is set) without a process group.
    paceline.PeerError, paceline.PeerTimeoutError
        If a rank ends, or does not call ``mean()`` within the process group's timeout.

    Examples
    --------
    >>> import paceline, torch
    >>> paceline.mean({"loss": torch.tensor(0.5), "n_rows": 32})
    {'loss': tensor(0.5000), 'n_rows': 32.0}

    The accuracy over the rows of all ranks, if some have more rows than others:

    >>> is_right = torch.tensor([True, True, False, True])
    >>> paceline.mean(is_right.float().mean(), weight=len(is_right))
    tensor(0.7500)
    """
    values = x if isinstance(x, Mapping) else {"": x}
    parts = [torch.empty(0, dtype=torch.float64, device="cpu")]
    names, spec, problem, share = list[Any](), "", None, 1.0
    try:
        names = sorted(values, key=repr)
        for name in names:
            what, part = _read_number(values[name])
            spec += (f", {name!r}: " if values is x else ", ") + what
            parts.append(part)
        if weight is not None:
            spec, share = f"{spec}, with a weight", _read_weight(weight)
    except Exception as error:  # any error: the other ranks must learn of it
        problem = error
    flat = torch.cat(parts)
    shares = _exchange("mean()", spec[2:], share, float, problem)
    if (total := math.fsum(shares)) == 0:
        raise ValueError("mean() got weight=0 on every rank: there is nothing to mean")
    if weight is not None:
        flat = flat * (share / total) if share > 0 else torch.zeros_like(flat)
    if len(shares) > 1:
        flat = flat if "cpu" in torch_groups.backends_by_device() else flat.cuda()
        with _messages.awaited("mean()", torch_groups.default_group()):
            dist.all_reduce(flat)
    flat = flat.cpu() if weight is not None else flat.cpu() / len(shares)
    means = flat.split_with_sizes([len(part) for part in parts[1:]])
    found = dict(zip(names, means, strict=True))
    found = {name: _restore(found[name], value) for name, value in values.items()}
    return found if values is x else found[""]


def _read_number(value: Any) -> tuple[str, torch.Tensor]:
    """Describe a value, and return its numbers as a flat float64 tensor."""
    if isinstance(value, numbers.Real | np.bool_):
        number = torch.tensor([float(value)], dtype=torch.float64, device="cpu")
        return "a number", number
    if _is_dense(value) and not value.is_complex():
        flat = value.detach().to("cpu", torch.float64).reshape(-1)
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}", flat
    kind = type(value).__name__
    raise TypeError(f"mean() got a {kind}: give real numbers, dense tensors or a dict")


def _read_weight(weight: Any) -> float:
    if isinstance(weight, torch.Tensor) and weight.dim() == 0:
        weight = weight.item()
    if not isinstance(weight, numbers.Real) or not 0 <= float(weight) < math.inf:
        raise ValueError(f"mean() got weight={weight!r}: give a number of at least 0")
    return float(weight)


def _restore(mean: torch.Tensor, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return mean.item()
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    return mean.reshape(value.shape).to(value.device, dtype, copy=True)


def _is_dense(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not torch_groups.is_dtensor(value)
        and value.layout == torch.strided
        and not value.is_meta
        and not value.is_quantized
    )


def _exchange(
    call: str, spec: str, own: Any, kind: Any, problem: Exception | None
) -> list[Any]:
    """Return each rank's `own`; raise on every rank if specs differ, or one failed."""
    told = []
    try:
        mine = _messages.pack((call, (spec, None, own)))
    except ValueError as error:  # too long
        problem = problem or error
    if problem is not None:
        mine = _messages.pack((call, (spec, str(problem), None)))
    if torch_groups.rank_and_size()[1] > 1:
        form = tuple[str, str | None, kind | None]
        told = [*_messages.exchange(call, mine, form)]
    if problem is not None:
        raise problem
    for sender, (theirs, failure, _) in enumerate(told):
        if failure is not None:
            raise MismatchError(f"rank {sender} failed in {call}: {failure}")
        if theirs != told[0][0]:
            words = f"rank 0 has {told[0][0]} where rank {sender} has {theirs}"
            raise MismatchError(f"{call} needs the same of every rank, but {words}")
    return [theirs for *_, theirs in told] or [own]


# ---- gather --------------------------------------------------------------------------


@overload
def gather(x: torch.Tensor) -> torch.Tensor: ...
@overload
def gather(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]: ...
@overload
def gather(x: Mapping[_Key, Any]) -> dict[_Key, Any]: ...
@overload
def gather(x: tuple[Any, ...]) -> tuple[Any, ...]: ...
@overload
def gather(x: Any) -> list[Any]: ...
@torch_core.uncompiled
def gather(x: Any) -> Any:
    """Return the rows of all ranks, in the order of ranks, on every rank.

    All ranks must call it together, each with its own rows.  A plain single process
    needs no process group.

    Parameters
    ----------
    x : torch.Tensor, numpy.ndarray, list, plain value, or dict or tuple of these
        Rows of the same shape and dtype on every rank; their number may differ.  Lists
        hold plain values: None, bool, int, float, str, bytes, and lists and dicts of
        these; up to 64 MiB a rank.

    Returns
    -------
    torch.Tensor, numpy.ndarray, list, dict or tuple
        Tensors and arrays are joined along the first dimension; a tensor keeps its
        device and loses its autograd graph.  Tensors without dimensions give a vector
        of one element a rank.  Lists are joined.  Any other plain value gives a list of
        one a rank.  Dicts and tuples give dicts and tuples.

    Raises
    ------
    TypeError, paceline.MismatchError
        If `x` is something else; on every rank, if names, kinds, dtypes or the shapes
        of rows differ.
    ValueError
        In a rank (``WORLD_SIZE`` is set) without a process group.
    paceline.PeerError, paceline.PeerTimeoutError
        If a rank ends, or does not call it within the process group's timeout.

    Examples
    --------
    >>> import paceline, torch
    >>> paceline.gather({"scores": torch.tensor([0.5, 1.0]), "files": ["a", "b"]})
    {'scores': tensor([0.5000, 1.0000]), 'files': ['a', 'b']}
    >>> paceline.gather(3)
    [3]
    """
    specs, pairs, own, problem = [], [], _Own([], [], is_on_gpu=True), None
    try:
        for at, leaf in _leaves(x, ""):
            what, tensor = _read_rows(leaf)
            specs.append(at + what)
            pairs.append((leaf, tensor))
            own.plain.append(leaf if tensor is None else None)
            own.n_rows.append(0 if tensor is None else len(tensor))
            own.is_on_gpu &= tensor is None or tensor.is_cuda
    except Exception as error:  # any error: the other ranks must learn of it
        problem = error
    told = _exchange("gather()", ", ".join(specs), own, _Own, problem)
    is_on_gpu = all(each.is_on_gpu for each in told)
    joined: list[Any] = []
    for i, (leaf, tensor) in enumerate(pairs):
        if tensor is None:
            found = [each.plain[i] for each in told]
            is_list = isinstance(leaf, list)
            joined.append([*itertools.chain(*found)] if is_list else found)
        else:
            whole = _join(tensor, [each.n_rows[i] for each in told], is_on_gpu)
            joined.append(whole.numpy() if isinstance(leaf, np.ndarray) else whole)
    return _rebuilt(x, iter(joined))


@dataclass
class _Own:
    """What a rank tells of each of its leaves: its number of rows, or plain value."""

    n_rows: list[int]
    plain: list[Any]
    is_on_gpu: bool


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Return the leaves of dicts and tuples, with their places."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=repr):
            yield from _leaves(value[name], f"{at}[{name!r}] ")
    elif _is_tuple(value):
        for i, each in enumerate(value):
            yield from _leaves(each, f"{at}[{i}] ")
    else:
        yield at, value.item() if isinstance(value, np.generic) else value


def _is_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and not isinstance(value, PackedSequence)


def _rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    """Return a value with other leaves."""
    if isinstance(value, Mapping):
        names = sorted(value, key=repr)
        made = {name: _rebuilt(value[name], leaves) for name in names}
        return {name: made[name] for name in value}
    if _is_tuple(value):
        parts = [_rebuilt(each, leaves) for each in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return next(leaves)


def _read_rows(value: Any) -> tuple[str, torch.Tensor | None]:
    """Describe a leaf; return its rows, if it is a tensor or an array."""
    what = "a tensor"
    if type(value) is np.ndarray:  # its subclasses may carry more, such as a mask
        what, value = "an array", torch.from_numpy(np.array(value))
    if _is_dense(value):
        rows = value.detach().reshape(value.shape or 1)
        return f"{what} of {rows.dtype} rows of shape {tuple(rows.shape[1:])}", rows
    _check_plain(value)
    return "a list" if isinstance(value, list) else "a plain value", None


def _check_plain(value: Any, where: str = "") -> None:
    """Raise TypeError unless a message brings the same value to the other ranks."""
    kind = type(value)
    if kind is list:
        for each in value:
            _check_plain(each, " in a list")
    elif kind is dict and value.keys() != {""} and all(type(k) is str for k in value):
        for each in value.values():
            _check_plain(each, " in a list")
    elif value is not None and kind not in (bool, int, float, str, bytes):
        raise TypeError(
            f"gather() got a {kind.__name__}{where}: give dense tensors, arrays, plain "
            "values and lists of these values, or dicts and tuples of all that; "
            "torch.distributed.all_gather_object sends other objects"
        )


def _join(rows: torch.Tensor, counts: list[int], is_on_gpu: bool) -> torch.Tensor:
    """Return the rows of all ranks.  They travel as bytes: Gloo lacks some dtypes."""
    if len(counts) == 1:
        return rows.clone()
    shape, width = rows.shape[1:], math.prod(rows.shape[1:]) * rows.itemsize
    group, backends = torch_groups.default_group(), torch_groups.backends_by_device()
    is_on_gpu &= "cuda" in backends or "nccl" in backends
    is_on_gpu |= torch_groups.is_device_bound(group)
    device = "cuda" if is_on_gpu else "cpu"
    mine = torch.zeros(max(counts) * width, dtype=torch.uint8, device=device)
    flat = rows.resolve_conj().resolve_neg().reshape(-1)
    mine[: len(rows) * width] = flat.contiguous().view(torch.uint8)
    blocks = [torch.empty_like(mine) for _ in counts]
    with _messages.awaited("gather()", group):
        dist.all_gather(blocks, mine)
    return torch.cat(
        [
            block[: n * width].to(rows.device).view(rows.dtype).reshape(n, *shape)
            for block, n in zip(blocks, counts, strict=True)
        ]
    )
