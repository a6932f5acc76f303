"""paceline.replicate: marks arguments that must not be split over replicas."""

from __future__ import annotations

from typing import Any

from paceline import _native
from paceline._compat.packed_sequence import Replicated


def replicate(value: Any) -> Any:
    """Mark an argument of a :class:`paceline.DataParallel` so that it is not split.

    Each replica gets the whole value: an attention mask shared by all rows, a table of
    positions, a codebook.  The module sees the value itself, without the mark.

    Parameters
    ----------
    value : object
        A tensor, an array, or an object that holds some.  The marked value may be
        inside a list, tuple or dict.

    Returns
    -------
    object
        The marked value, for a call of a ``DataParallel``.

    Examples
    --------
    >>> import paceline, torch
    >>> class Shift(torch.nn.Module):
    ...     def forward(self, x, by):
    ...         return x + by
    >>> model = paceline.DataParallel(Shift(), device_ids=["cpu", "cpu"])
    >>> model(torch.zeros(2, 3), paceline.replicate(torch.arange(3)))
    tensor([[0., 1., 2.],
            [0., 1., 2.]])
    """
    return Replicated(value)


def has_mark(value: Any) -> bool:
    """Tell whether a value is marked, or contains a marked one."""
    return _native.leaves(value)[1]


def unmarked(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call, (args, kwargs), without marks."""
    tree, _, (leaves,) = _native.scatter(inputs, kwargs, 1, 0)
    return tree.unflatten(leaves)
