"""How many threads this process's operators run on, while replicas share the cores."""

from __future__ import annotations

import weakref

import torch


class IntraOp:
    """The share of the cores that this process's operators have, for a while."""

    def __init__(self, n_threads: int) -> None:
        self._before = torch.get_num_threads()
        self._own = min(n_threads, self._before)
        torch.set_num_threads(self._own)
        self.give_back = weakref.finalize(self, _restore, self._own, self._before)
        self.give_back.atexit = False


def _restore(own: int, before: int) -> None:
    if torch.get_num_threads() == own:  # else somebody else has set it since
        torch.set_num_threads(before)
