"""What the caller's process and its replicas say to one another.

A request and its answer are a kind, a payload of bytes, and tensors.

=========  ==========================================  ================================
request    payload; tensors                            answer's payload; tensors
=========  ==========================================  ================================
MODEL      a pickled :class:`Model`                    digests of what it has imported,
                                                       pickled: see ``imports.py``
FORWARD    :data:`FORWARD_HEADER`, then a pickled      if asked, the mask of slots that
           update; the leaves of the inputs            backward will reach; the output's
                                                       pickled tree, if asked, or if it
                                                       is not that of the last time;
                                                       the leaves of the output
BACKWARD   :data:`BACKWARD_HEADER`; the gradients of   the mask of slots that are used,
           the outputs that require one                then what fallback gradients are;
                                                       gradients of inputs, and
                                                       fallback gradients
=========  ==========================================  ================================

A double backward adds to the request :data:`DOUBLE_HEADER`; a byte for each slot and
each input, whether its gradient is wanted; numbers of graphs that are dropped.  It adds
to the answer, after the mask of slots that are used: a byte a slot, whether its
gradient has a graph; a byte for each slot, flagged gradient of an output, and input,
whether that graph reaches it.

A fallback gradient is one that no slot can hold: sparse, or of another dtype.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline._compat import torch_core, torch_flags, torch_modes
from paceline._dp.process import pickling
from paceline._replicas import thread_state
from paceline._workers import log_records

MODEL = 1
FORWARD = 2
BACKWARD = 3
WRITTEN = 4
"""An answer to FORWARD: it has written parameters, whose indices come pickled."""

FORWARD_HEADER = struct.Struct("<QQQI")
"""Graph, seeds of torch's generator and of others, and the bits below."""
GRAD, TRACKED, INFERENCE, UPDATE, WANTS_TREE, WANTS_USED, TRIAL = (
    1 << i for i in range(7)
)

BACKWARD_HEADER = struct.Struct("<QI")
"""Graph, and the bits below."""
KEEP_GRAPH, ACCUMULATE, DOUBLE = 1, 2, 4

DOUBLE_HEADER = struct.Struct("<QI")
"""The graph of the double backward, and how many inputs the last graph had."""


@dataclass(frozen=True)
class Model:
    """All that a replica needs to build its module.

    Attributes
    ----------
    memory : list of (int, int)
        Shared memory: a descriptor in the caller's process, and its size in bytes.
    parameters : list
        Of each parameter: which memory, its place and its description.
    replica_memory : int
        Which memory the places below are in.
    buffers : list
        Each buffer's place.
    gradients : list
        Indices of the parameters that have a slot, and each slot's place.
    skeleton : bytes
        The module, pickled without parameters and buffers: ``snapshot.py``.
    keeps_memory : bool
        Whether parameters and gradients lie where they did, in the same tensors.
    imported : list of (str, str)
        Modules, and names in them, of which the caller wants digests.
    libraries : list of str
        Files that define operators of torch.
    path : list of str
        Where modules are looked for.
    """

    memory: list[tuple[int, int]]
    parameters: list[tuple[int, pickling.Place, pickling.Description]]
    replica_memory: int
    buffers: list[pickling.Place]
    gradients: list[tuple[int, pickling.Place]]
    skeleton: bytes
    keeps_memory: bool
    imported: list[tuple[str, str]]
    libraries: list[str]
    path: list[str]


class Modes(NamedTuple):
    """What a replica must share: torch's state in the caller's thread, and loggers'."""

    autocast: tuple[bool, torch.dtype, bool]
    flags: list[Any]
    device: str | None
    levels: log_records.Levels

    @classmethod
    def now(cls) -> Modes:
        """Return this thread's; raise where another process would not see them."""
        device = None
        if torch_modes.binds_to_process():
            device = thread_state.default_device()
        return cls(
            torch_core.autocast_on_cpu(),
            torch_flags.flags(),
            device,
            log_records.levels(),
        )

    def adopt(self) -> None:
        """Make them this process's, all but autocast and the device."""
        torch_flags.set_flags(self.flags)
        log_records.adopt(self.levels)
