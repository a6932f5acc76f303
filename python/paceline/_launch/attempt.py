"""The ranks of one start agree on a prefix that no earlier start has used.

torchrun keeps its store across restarts of the ranks, with all keys that dead ranks
have written.  New ranks would read Gloo's old addresses and try to reach them.  So each
start puts a prefix before all its keys.  The ranks agree on the prefix in the same
store, in spite of old answers: a rank accepts only the answer that repeats the random
number that it has just drawn.

::

    rank r    hello/r = its random number                   <token>/r = "there"
    rank 0          answer/r = that, and the token ...  until all are there
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
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
        return _bring_together(store, range(1, size), patience)
    drawn = secrets.token_hex(8)
    store.set(f"{_PREFIX}/hello/{rank}", drawn)
    answer = f"{_PREFIX}/answer/{rank}"
    token = ""

    def is_answered() -> bool:
        nonlocal token
        found = store.get(answer) if store.check([answer]) else b""
        heard, _, token = found.decode(errors="replace").partition(" ")
        return bool(heard == drawn)

    _await(is_answered, patience, lambda: "rank 0 does not answer")
    store.set(f"{_PREFIX}/{token}/{rank}", "there")
    return f"{_PREFIX}/{token}"


def _bring_together(store: Any, others: Iterable[int], patience: Patience) -> str:
    """Act as rank 0: answer each rank until it has received the right answer."""
    token = secrets.token_hex(8)
    missing = set(others)
    answered: dict[int, bytes] = {}

    def are_all_there() -> bool:
        for rank in sorted(missing):
            hello = f"{_PREFIX}/hello/{rank}"
            if store.check([f"{_PREFIX}/{token}/{rank}"]):
                missing.discard(rank)
            elif store.check([hello]):
                drawn = store.get(hello)
                if answered.get(rank) != drawn:  # the first may be an earlier rank's
                    answered[rank] = drawn
                    text = drawn.decode(errors="replace")
                    store.set(f"{_PREFIX}/answer/{rank}", f"{text} {token}")
        return not missing

    _await(are_all_there, patience, lambda: f"ranks {sorted(missing)} have not come")
    return f"{_PREFIX}/{token}"


def _await(
    is_done: Callable[[], bool], patience: Patience, describe: Callable[[], str]
) -> None:
    while not is_done():
        if patience.left() < 0:
            raise TimeoutError(describe())
        time.sleep(_POLL_SECONDS)
