"""What the caller's process and its replicas say to one another.

A request and its answer are a kind, a few bytes of words, and tensors.

=========  ==========================================  ================================
request    words; tensors                              answer's words; tensors
=========  ==========================================  ================================
MODEL      a pickled :class:`Model`                    none
FORWARD    :data:`FORWARD_WORDS`, then pickled news;   if asked, the mask of slots that
           the leaves of the inputs                    backward will reach; the output's
                                                       pickled tree, if asked, or if it
                                                       is not that of the last time;
                                                       the leaves of the output
BACKWARD   :data:`BACKWARD_WORDS`; the gradients of    the mask of slots that are used,
           the outputs that require one                then what strays are; gradients
                                                       of inputs, and strays
=========  ==========================================  ================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline import _torch, _travel

MODEL = 1
FORWARD = 2
BACKWARD = 3

FORWARD_WORDS = struct.Struct("<QQQI")
"""Call, seeds of torch's generator and of others, and the bits below."""
GRAD, TRACKED, INFERENCE, NEWS, TELL_TREE, TELL_USED = 1, 2, 4, 8, 16, 32
MOST_SEED = 2**63 - 1

BACKWARD_WORDS = struct.Struct("<QI")
"""Call, and the bits below."""
KEEP_GRAPH, ACCUMULATE = 1, 2


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
    """

    arenas: list[tuple[int, int]]
    parameters: list[tuple[int, _travel.Place, _travel.Description]]
    own_arena: int
    buffers: list[_travel.Place]
    gradients: list[tuple[int, _travel.Place]]
    skeleton: bytes


class Modes(NamedTuple):
    """What of torch's state a replica must share with the caller's thread."""

    autocast: tuple[bool, torch.dtype, bool]
    default_dtype: torch.dtype
    is_deterministic: bool
    warns_only: bool
    matmul_precision: str

    @classmethod
    def now(cls) -> Modes:
        """Return this thread's."""
        return cls(
            _torch.autocast_on_cpu(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
        )

    def adopt(self) -> None:
        """Make them this process's, all but autocast.

        What is so already is left alone: torch imports its compiler, which takes a
        second, before it sets some of them.
        """
        now = Modes.now()
        if self.default_dtype != now.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if self[2:4] != now[2:4]:
            torch.use_deterministic_algorithms(
                self.is_deterministic, warn_only=self.warns_only
            )
        if self.matmul_precision != now.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
