"""``paceline.mean()``: average numbers and tensors over ranks."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline import _messages
from paceline._compat import torch_groups
from paceline._errors import MismatchError


def mean(x: Any) -> Any:
    """Return the mean over ranks of a number or a tensor, or of each in a dict.

    All ranks must call it together, each with its own value; all get the same result.
    A plain single process needs no process group.

    Parameters
    ----------
    x : real number, dense tensor of real numbers, or dict of these
        The same kind, shape and dtype on every rank.

    Returns
    -------
    float, torch.Tensor or dict
        A number gives a float.  A tensor gives a new one on its device, without an
        autograd graph, of the dtype of ``x / 2``: the same for floating-point tensors,
        torch's default dtype for others.  Sums are float64 and rounded once at the end.

    Raises
    ------
    TypeError, paceline.MismatchError
        If `x` is something else; on every rank, if names, shapes or dtypes differ.
    ValueError
        In a rank (``WORLD_SIZE`` is set) without a process group.
    paceline.PeerError, paceline.PeerTimeoutError
        If a rank ends, or does not call ``mean()`` within the process group's timeout.

    Examples
    --------
    >>> import paceline, torch
    >>> paceline.mean({"loss": torch.tensor(0.5), "n_rows": 32})
    {'loss': tensor(0.5000), 'n_rows': 32.0}
    """
    values = x if isinstance(x, Mapping) else {"": x}
    names = sorted(values, key=repr)
    parts = [torch.empty(0, dtype=torch.float64, device="cpu")]
    spec, problem = "", None
    try:
        for name in names:
            what, part = _read(values[name])
            spec += (f", {name!r}: " if values is x else ", ") + what
            parts.append(part)
    except Exception as error:  # any error: the other ranks must learn of it
        problem = error
    flat = torch.cat(parts)
    if torch_groups.rank_and_size()[1] > 1:
        flat = _reduce(spec[2:], flat, problem)
    elif problem is not None:
        raise problem
    means = flat.split_with_sizes([len(part) for part in parts[1:]])
    found = dict(zip(names, means, strict=True))
    found = {name: _restore(found[name], value) for name, value in values.items()}
    return found if values is x else found[""]


def _reduce(spec: str, flat: torch.Tensor, problem: Exception | None) -> torch.Tensor:
    torch_groups.wait_for_gloo_at_exit()
    # Exchange the specs first, since all_reduce needs equal sizes.
    mine = _messages.pack((spec, problem and str(problem)))
    group = torch_groups.default_group()
    with _messages.awaited("mean()", group):
        rows = _messages.all_gather_by(group, mine)
    if problem is not None:
        raise problem
    kind, own = tuple[str, str | None], dist.get_rank()
    told = [
        _messages.unpack(row, kind, f"rank {own}: rank {rank}")
        for rank, row in enumerate(rows)
    ]
    for rank, (theirs, failure) in enumerate(told):
        if failure is not None:
            raise MismatchError(f"rank {rank} failed in mean(): {failure}")
        if theirs != told[0][0]:
            words = f"rank 0 has {told[0][0]} where rank {rank} has {theirs}"
            raise MismatchError(f"mean() needs the same of every rank, but {words}")
    flat = flat if "cpu" in torch_groups.backends_by_device() else flat.cuda()
    with _messages.awaited("mean()", group):
        dist.all_reduce(flat)
    return flat.cpu() / len(told)


def _read(value: Any) -> tuple[str, torch.Tensor]:
    """Describe a value, and return its numbers as a flat float64 tensor."""
    if isinstance(value, numbers.Real | np.bool_):
        number = torch.tensor([float(value)], dtype=torch.float64, device="cpu")
        return "a number", number
    is_plain = isinstance(value, torch.Tensor) and not torch_groups.is_dtensor(value)
    if is_plain and value.layout == torch.strided and not value.is_complex():
        flat = value.detach().to("cpu", torch.float64).reshape(-1)
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}", flat
    kind = type(value).__name__
    raise TypeError(f"mean() got a {kind}: give real numbers, dense tensors or a dict")


def _restore(mean: torch.Tensor, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return mean.item()
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    return mean.reshape(value.shape).to(value.device, dtype, copy=True)
