"""The first messages between the ranks of a wrapper: what they must agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline import _environment, _native, _recorder
from paceline._compat import mistakes
from paceline._ddp import mixed_precision, model_spec, options, placement
from paceline._ddp.model_spec import Model
from paceline._ddp.rendezvous import Meeting
from paceline._messages import Failure


@dataclass(frozen=True)
class Greeting:
    """What a rank tells the others before they have a world."""

    digest: str | None  # of its model
    options: dict[str, str]
    failure: Failure | None
    placement: placement.Placement
    identity: str
    copies: bool = True  # rank 0's parameters
    n_taken: int = 0  # steps, in worlds that have failed since


CHANGED_ALONE = (
    "Parameters or buffers that ranks synchronise were changed after wrapping, and not "
    "on every rank before the same forward: change them everywhere, or nowhere"
)


@dataclass
class Wish:
    """What a wrapper needs for a world, and its ranks must agree on."""

    module: Any
    options: options.Options
    sends_buffers: bool
    has_buffers: bool  # otherwise torch never sends any
    copies: bool  # rank 0's tensors, if they are copied at the start
    n_taken: int

    def agree(
        self,
        meeting: Meeting,
        read_arguments: Callable[[Model], None] | None,
        error: Exception | None,
    ) -> tuple[Model, placement.Gpu | None, list[str]]:
        """Return model, GPU, all ranks' identities; or raise any rank's error."""
        module, given = self.module, self.options
        model, gpu, here = Model([], []), None, placement.Placement()
        travelling = model
        try:
            mistakes.check_module(module)
            model = Model.of(module)
            if read_arguments is not None:
                read_arguments(model)
            elif not self.has_buffers:
                model = dataclasses.replace(model, buffers=[])
            model.check()
            travelling = model.without(**given.staying)
            travelling.check_travelling(has_peers=meeting.size > 1)
            if self.sends_buffers:
                model.check_buffers()
            model.check_supported(module)
            mixed_precision.check(module, model, given.precision)
            device = model.parameters[0][1].device
            if placement.is_gpu(device):
                gpu, here = placement.open_gpu(device, is_alone=meeting.size == 1)
        except (RuntimeError, TypeError, ValueError, MemoryError, OSError) as problem:
            error = error or problem
        agreed = {
            "bucket_cap_mb": given.cap_mb,
            "broadcast_buffers": given.sync_buffers,
            "init_sync": given.sync_at_start,
            "a hook for buffers": self.sends_buffers,
            "strict": given.strict,
            "PACELINE_CHECK": _environment.check(),
            "mixed_precision": given.precision,
            "gradient_as_bucket_view": given.view_bytes(gpu is not None),
        }
        mine = Greeting(
            digest=None if error is not None else travelling.digest(),
            options={name: str(value) for name, value in agreed.items()},
            failure=Failure.of(error) if error is not None else None,
            placement=here,
            identity=_recorder.identity(),
            copies=self.copies,
            n_taken=self.n_taken,
        )
        return model, gpu, _agree(meeting, mine, travelling, error)


def _agree(
    meeting: Meeting, mine: Greeting, model: Model, error: Exception | None
) -> list[str]:
    """Return all ranks' identities; or raise, on every rank, any rank's error."""
    received: list[Greeting] = meeting.exchange(mine, Greeting)
    if error is not None:
        raise error
    for rank, theirs in enumerate(received):
        if theirs.failure is not None:
            raise theirs.failure.exception(rank)
    if len({theirs.copies for theirs in received}) > 1:
        raise _native.MismatchError(
            f"rank {meeting.rank}: models differ. {CHANGED_ALONE}"
        )
    _check_taken([theirs.n_taken for theirs in received], meeting.rank)
    placement.raise_conflict([theirs.placement for theirs in received])
    options.raise_first_difference([theirs.options for theirs in received])
    # Buckets must agree in any case, or gradients of parameters would mix.
    if len({theirs.digest for theirs in received}) > 1:
        kind = model_spec.Description
        model_spec.raise_first_difference(meeting.exchange(model.describe(), kind))
    return [theirs.identity for theirs in received]


def _check_taken(n_taken: list[int], rank: int) -> None:
    """Raise if a step has ended on some ranks and failed on others."""
    most, least = n_taken.index(max(n_taken)), n_taken.index(min(n_taken))
    if n_taken[most] > n_taken[least]:
        raise _native.MismatchError(
            f"rank {rank}: a step has ended on some ranks only (rank {most} has taken "
            f"{n_taken[most]}, rank {least} {n_taken[least]}), so weights differ: load "
            "them from a checkpoint, and wrap the model anew on every rank"
        )
