"""Arguments and outputs of replicas, where a subclass or a caller has a say in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline import _native

if TYPE_CHECKING:
    from paceline._dp import DataParallel

Lists = tuple[Sequence[Any], Sequence[dict[str, Any]]]


def arguments(owner: DataParallel, args: Any, kwargs: Any) -> Lists:
    """Return each replica's arguments, as a ``scatter`` of somebody's own has them.

    Parameters
    ----------
    owner : paceline.DataParallel
        The wrapper that is about to run its module.
    args, kwargs : iterable
        What its ``scatter`` has returned; None stands for no keyword arguments.

    Raises
    ------
    ValueError
        If there are more than replicas, or the two disagree about their number.
    """
    args = tuple(args)
    named = ({},) * len(args) if kwargs is None else tuple(kwargs)
    if not args and not named:
        return ((),), ({},)
    if len(args) != len(named):
        raise ValueError(
            f"scatter() gave {len(args)} replicas arguments, and {len(named)} "
            "keyword arguments: give both to each, be they () and {}"
        )
    if len(args) > len(owner.device_ids):
        raise ValueError(
            f"scatter() gave arguments for {len(args)} replicas, and there are "
            f"{len(owner.device_ids)}"
        )
    return args, named


def join(outputs: Sequence[Any], sizes: tuple[int, ...] | None, dim: int) -> Any:
    """Return the output for the whole batch.

    Parameters
    ----------
    outputs : sequence
        One a replica, in order.
    sizes : tuple of int or None
        The rows of each; None where arguments were split by somebody else.
    dim : int
        The batch's dimension.
    """
    outputs = list(outputs)
    if len(outputs) == 1:
        return outputs[0]
    if sizes is None:
        sizes = tuple(_rows(output, dim) for output in outputs)
    return _native.gather(outputs, sizes, dim)


def _rows(output: Any, dim: int) -> int:
    for leaf in _native.flatten(output)[1]:
        if -leaf.ndim <= dim < leaf.ndim:
            return int(leaf.shape[dim])
    return 1
