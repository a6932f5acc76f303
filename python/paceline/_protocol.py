"""What the caller's process and its replicas say to one another.

A request and its answer are a kind, a few bytes of words, and tensors.

=========  ==========================================  ================================
request    words; tensors                              answer's words; tensors
=========  ==========================================  ================================
MODEL      a pickled :class:`Model`                    none
CODE       digests of code, pickled: ``_code.py``      those that differ, pickled
FORWARD    :data:`FORWARD_WORDS`, then pickled news;   if asked, the mask of slots that
           the leaves of the inputs                    backward will reach; the output's
                                                       pickled tree, if asked, or if it
                                                       is not that of the last time;
                                                       the leaves of the output
BACKWARD   :data:`BACKWARD_WORDS`; the gradients of    the mask of slots that are used,
           the outputs that require one                then what strays are; gradients
                                                       of inputs, and strays
                                                       (where it is recorded, see
                                                       ``_higher.py``)
=========  ==========================================  ================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline import _state, _torch, _torch_flags, _torch_modes, _travel

MODEL = 1
FORWARD = 2
BACKWARD = 3
CODE = 4

FORWARD_WORDS = struct.Struct("<QQQI")
"""Call, seeds of torch's generator and of others, and the bits below."""
GRAD, TRACKED, INFERENCE, NEWS, TELL_TREE, TELL_USED = 1, 2, 4, 8, 16, 32
MOST_SEED = 2**63 - 1

BACKWARD_WORDS = struct.Struct("<QI")
"""Call, and the bits below."""
KEEP_GRAPH, ACCUMULATE, RECORD = 1, 2, 4


@dataclass(frozen=True)
class Model:
    """All that a replica needs to build its module.

    Attributes
    ----------
    arenas : list of (int, int)
        Shared memory: a descriptor in the caller's process, and its size in bytes.
    parameters : list
        Each parameter's arena, place and description.
    own_arena : int
        Which arena the places below are in.
    buffers : list
        Each buffer's place.
    gradients : list
        Indices of the parameters that have a slot, and each slot's place.
    skeleton : bytes
        The module, pickled without parameters and buffers; its buffers' dictionaries
        and names with it.
    libraries : list of str
        Files that define operators of torch.
    path : list of str
        Where modules are looked for.
    """

    arenas: list[tuple[int, int]]
    parameters: list[tuple[int, _travel.Place, _travel.Description]]
    own_arena: int
    buffers: list[_travel.Place]
    gradients: list[tuple[int, _travel.Place]]
    skeleton: bytes
    libraries: list[str]
    path: list[str]


class Modes(NamedTuple):
    """What of torch's state a replica must share with the caller's thread."""

    autocast: tuple[bool, torch.dtype, bool]
    flags: list[Any]
    device: str | None

    @classmethod
    def now(cls) -> Modes:
        """Return this thread's.

        Raises
        ------
        ThisCallError
            If something is on that another process would not see.
        """
        device = None
        if _torch_modes.binds_to_process():
            device = _state.default_device()
        return cls(_torch.autocast_on_cpu(), _torch_flags.flags(), device)

    def adopt(self) -> None:
        """Make them this process's, all but autocast and the device."""
        _torch_flags.set_flags(self.flags)
