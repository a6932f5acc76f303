"""The first messages between the ranks of a wrapper: what they must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline import _recorder
from paceline._ddp import model_spec, options, placement
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


def agree(
    meeting: Meeting,
    model: model_spec.Model,
    given: dict[str, Any],
    here: placement.Placement,
    error: Exception | None,
) -> list[str]:
    """Return all ranks' identities; or raise, on every rank, any rank's error.

    `model` and the options `given` must agree; `error` is this rank's.
    """
    mine = Greeting(
        digest=None if error is not None else model.digest(),
        options={name: str(value) for name, value in given.items()},
        failure=Failure.of(error) if error is not None else None,
        placement=here,
        identity=_recorder.identity(),
    )
    received: list[Greeting] = meeting.exchange(mine, Greeting)
    if error is not None:
        raise error
    for rank, theirs in enumerate(received):
        if theirs.failure is not None:
            raise theirs.failure.exception(rank)
    placement.raise_conflict([theirs.placement for theirs in received])
    options.raise_first_difference([theirs.options for theirs in received])
    # Buckets must agree in any case, or gradients of parameters would mix.
    if len({theirs.digest for theirs in received}) > 1:
        kind = model_spec.Description
        model_spec.raise_first_difference(meeting.exchange(model.describe(), kind))
    return [theirs.identity for theirs in received]
