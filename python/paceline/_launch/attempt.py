"""The ranks of one start agree on a name that no earlier start has used.

torchrun keeps its store from one start of the ranks to the next, and with it all that
ranks have written who are dead by now: Gloo's addresses among them, which the next
ranks would read and try to reach.  So everything of a start gets a prefix of its own.
That itself is agreed on in a store where old answers lie about: a rank believes the one
that repeats what it has just drawn.

::

    rank r    hello/r = what it has drawn                   <token>/r = "there"
    rank 0          answer/r = that, and the token ...  until all are there
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

_PREFIX = "paceline/init"
_POLL_SECONDS = 0.005


def agree_on_prefix(store: Any, rank: int, size: int, seconds: float) -> str:
    """Return what this start's ranks, and nobody else, put before their keys.

    Parameters
    ----------
    store : torch.distributed.Store
        What all ranks have in common, and earlier ones had.
    rank, size : int
        This rank, and how many there are.
    seconds : float
        How long ranks are waited for.

    Raises
    ------
    TimeoutError
        If some do not come; it names them on rank 0.
    """
    until = time.monotonic() + seconds
    if rank == 0:
        return _bring_together(store, range(1, size), until)
    drawn = secrets.token_hex(8)
    store.set(f"{_PREFIX}/hello/{rank}", drawn)
    answer = f"{_PREFIX}/answer/{rank}"
    token = ""

    def is_answered() -> bool:
        nonlocal token
        text = store.get(answer).decode() if store.check([answer]) else ""
        heard, _, token = text.partition(" ")
        return bool(heard == drawn)

    _await(is_answered, until, lambda: "rank 0 does not answer")
    store.set(f"{_PREFIX}/{token}/{rank}", "there")
    return f"{_PREFIX}/{token}"


def _bring_together(store: Any, others: Iterable[int], until: float) -> str:
    """Be rank 0: answer each rank until it has heard the right answer."""
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
                    store.set(f"{_PREFIX}/answer/{rank}", f"{drawn.decode()} {token}")
        return not missing

    _await(are_all_there, until, lambda: f"ranks {sorted(missing)} have not come")
    return f"{_PREFIX}/{token}"


def _await(
    is_done: Callable[[], bool], until: float, describe: Callable[[], str]
) -> None:
    while not is_done():
        if time.monotonic() > until:
            raise TimeoutError(describe())
        time.sleep(_POLL_SECONDS)
