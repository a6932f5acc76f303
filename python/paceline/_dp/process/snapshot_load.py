"""A replica's side of a module's plain state: see ``snapshot.py``."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline._dp.process import pickling


def load_skeleton(payload: bytes, known: dict[Any, Any]) -> list[nn.Module]:
    """Return the parts of a skeleton; `known` gets them by their keys."""
    stream = pickling.load_stream(payload, known)
    makers = next(stream)
    for i, maker in enumerate(makers):
        if maker:
            part = maker[0](*maker[1])
            vars(part).update(vars(nn.Module()))
            known["module", i] = part
    for i, name, value in stream:
        if name:
            vars(known["module", i])[name] = value
        elif i < 0:
            for at, constants in value:
                vars(known["module", at]).update(constants)
        elif makers[i]:
            vars(known["module", i]).update(value)
        else:
            known["module", i] = value
    return [known["module", i] for i in range(len(makers))]


def load_attributes(payload: bytes, known: dict[Any, Any]) -> None:
    """Write into a replica's parts what :meth:`ModelState.changes` has pickled."""
    for i, name, *value in pickling.load_stream(payload, known):
        held = vars(known["module", i])
        if value:
            held[name] = value[0]
        else:
            held.pop(name, None)
