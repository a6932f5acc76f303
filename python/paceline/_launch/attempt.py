"""The ranks of one start agree on a prefix that no earlier start has used.

torchrun keeps its store across restarts of the ranks, with all keys that dead ranks
have written.  New ranks would read Gloo's old addresses and try to reach them.  So each
start puts a prefix before all its keys.  The ranks agree on the prefix in the same
store, in spite of old answers: a rank counts its starts, and reads only the answer to
the last one.  torchrun's own count does not do: it differs between hosts.

::

    rank r    starts/r += 1                              <prefix>/r = "there"
    rank 0       answer/r/<starts> = the prefix ...  until all are there
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from paceline._waiting import Patience

_PREFIX = "paceline/init"
_POLL_SECONDS = 0.005


def agree_on_prefix(store: Any, rank: int, size: int, seconds: float) -> str:
    """Return the prefix that only the ranks of this start put before their keys.

    They share `store`, which earlier ranks used.  Raise TimeoutError if some do not
    come within `seconds`; on rank 0 the error names them.
    """
    patience = Patience(seconds)
    if rank == 0:
        return _bring_together(store, size, patience)
    n_starts = store.add(f"{_PREFIX}/starts/{rank}", 1)
    answer = f"{_PREFIX}/answer/{rank}/{n_starts}"
    _await(lambda: store.check([answer]), patience, lambda: "rank 0 does not answer")
    prefix: str = store.get(answer).decode(errors="replace")
    store.set(f"{prefix}/{rank}", "there")
    return prefix


def _bring_together(store: Any, size: int, patience: Patience) -> str:
    """Act as rank 0: answer each rank until it has received the right answer."""
    prefix = f"{_PREFIX}/{secrets.token_hex(8)}"
    missing = set(range(1, size))

    def are_all_there() -> bool:
        for rank in sorted(missing):
            starts = f"{_PREFIX}/starts/{rank}"
            if store.check([f"{prefix}/{rank}"]):
                missing.discard(rank)
            elif store.check([starts]):  # the last one may be an earlier rank's
                n_starts = store.get(starts).decode(errors="replace")
                store.set(f"{_PREFIX}/answer/{rank}/{n_starts}", prefix)
        return not missing

    _await(are_all_there, patience, lambda: f"ranks {sorted(missing)} have not come")
    return prefix


def _await(
    is_done: Callable[[], bool], patience: Patience, describe: Callable[[], str]
) -> None:
    while not is_done():
        if patience.left() < 0:
            raise TimeoutError(describe())
        time.sleep(_POLL_SECONDS)
