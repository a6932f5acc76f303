"""What torch refuses and Paceline serves: refused too, under ``strict``.

For programs that must also run with torch's own class: ``PACELINE_STRICT=1``, or
``DistributedDataParallel(..., strict=True)``.  The words begin as torch's do.  A second
gradient of one parameter in a backward is refused by the native reducer itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline import _torch_groups

UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new "
    "one. "
)
_UNUSED = (
    "This error indicates that your module has parameters that were not used in "
    "producing loss. You can enable unused parameter detection by passing the keyword "
    "argument `find_unused_parameters=True` to "
    "`torch.nn.parallel.DistributedDataParallel`, and by making sure all `forward` "
    "function outputs participate in calculating loss. "
)
_ADVISE_DEBUG = (
    "\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to "
    "either INFO or DETAIL to print out information about which particular parameters "
    "did not receive gradient on this rank as part of this error"
)
_CHANGED = (
    "This error indicates that your training graph has changed in this iteration, "
    "e.g., one parameter is used in first iteration, but then got unused in the second "
    "iteration. this is not compatible with static_graph set to True."
)
_LATE_STATIC = (
    "set_static_graph() should be called before training loop starts and after "
    "DistributedDataParallel is constructed. Pass static_graph=True to the "
    "constructor, or leave it out: paceline does not need it."
)


def words_of_unused(
    names: Sequence[str],
    rank: int,
    fires: bytes,
    expected: bytes | None,
    has_changed: bool = False,
) -> str | None:
    """Return what torch says of parameters that the last step left out, if it did.

    Parameters
    ----------
    names : sequence of str
        Of the parameters that require a gradient, in the reducer's order.
    rank : int
        This one, in its group.
    fires : bytes
        How many gradients each had in the last step.
    expected : bytes or None
        How many each had in the first step, where the graph is static.
    has_changed : bool
        Whether the last step was refused, since it used what the first had not.

    Returns
    -------
    str or None
        None where nothing was left out, or the rank had no part in the step.
    """
    if not any(fires):
        return None
    wanted = expected if expected is not None else b"\1" * len(fires)
    missing = [
        i for i, (n, least) in enumerate(zip(fires, wanted, strict=True)) if n < least
    ]
    if not missing and not has_changed:
        return None
    cause, advice = _UNUSED, "Leave out strict"
    if expected is not None:
        cause, advice = _CHANGED, "Leave out static_graph, or strict"
    indices = " ".join(map(str, missing)) or "none, but others did than in the first"
    given = ", ".join(names[i] for i in missing)
    words = (
        f"\nParameter indices which did not receive grad for rank {rank}: {indices}"
        f"\nParameters which did not receive grad for rank {rank}: {given}"
    )
    if not _torch_groups.is_debugging():
        words += _ADVISE_DEBUG
    return f"{UNFINISHED}{cause}{words}\n{advice}: paceline averages what there is."


def words_of_late_static(n_steps: int) -> str | None:
    """Return what torch says where a graph is declared static after training began."""
    return _LATE_STATIC if n_steps > 0 else None
