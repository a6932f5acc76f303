"""Ranks meet in a store that still holds the keys of earlier ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from paceline._launch.init import agree_on_prefix

SECONDS = 60.0


def agree(store: dist.Store, size: int, ranks: list[int]) -> list[str]:
    """Start ranks in this order; return the result of each."""
    with ThreadPoolExecutor(size) as pool:
        jobs = [pool.submit(agree_on_prefix, store, r, size, SECONDS) for r in ranks]
        return [job.result() for job in jobs]


def new_store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=SECONDS))
    return store


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_agree_on_a_new_prefix_each_time(size):
    store = new_store()
    seen = set()
    for attempt in range(20):
        ranks = list(range(size))
        found = agree(store, size, ranks[::-1] if attempt % 2 else ranks)
        assert len(set(found)) == 1
        seen.add(found[0])
    assert len(seen) == 20


def test_what_ranks_left_who_died_on_the_way_is_not_believed():
    store = new_store()
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] have not come"):
        agree_on_prefix(store, 0, 3, 0.05)
    with pytest.raises(TimeoutError, match="rank 0 does not answer"):
        agree_on_prefix(store, 2, 3, 0.05)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] have not come"):
        agree_on_prefix(store, 0, 3, 0.05)  # it answered the rank that gave up
    assert len(set(agree(store, 3, [0, 1, 2]))) == 1


def test_a_world_may_shrink_and_grow():
    store = new_store()
    found = [agree(store, size, list(range(size))) for size in (3, 1, 2, 4)]
    assert all(len(set(of)) == 1 for of in found)
    assert len({of[0] for of in found}) == 4
