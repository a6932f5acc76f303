"""How many threads this process's operators run on, while replicas share the cores."""

from __future__ import annotations

import weakref

import torch


class IntraOp:
    """The share of the cores that this process's operators have, until given back.

    It holds between calls too.  Threads of OpenMP spin for milliseconds after an
    operator (of a loss, of an optimizer), and the workers' turn comes when they are
    done; an operator that wants a core on which a worker spins waits for its slice.
    """

    def __init__(self, n_threads: int) -> None:
        self._before = torch.get_num_threads()
        self._n_threads = min(n_threads, self._before)
        torch.set_num_threads(self._n_threads)
        self.give_back = weakref.finalize(self, _restore, self._n_threads, self._before)
        self.give_back.atexit = False


def _restore(n_threads: int, before: int) -> None:
    if torch.get_num_threads() == n_threads:  # else somebody else has set it since
        torch.set_num_threads(before)
