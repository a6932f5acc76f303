"""Ranks meet over a store: the number of requests, and errors about late ranks."""

import threading
from collections import Counter

import pytest
from paceline import _environment, _native
from paceline._ddp import greeting, peers

N_RANKS = 512


class Store:
    """The part of torch's store that peers.py uses; counts requests."""

    def __init__(self):
        self.values = {}
        self.asked = Counter()
        self.lock = threading.Lock()

    def set(self, key, value):
        with self.lock:
            self.asked["set"] += 1
            self.values[key] = value

    def get(self, key):
        with self.lock:
            self.asked["get"] += 1
            return self.values[key]

    def check(self, keys):
        with self.lock:
            self.asked["check"] += 1
            return all(key in self.values for key in keys)

    def delete_key(self, key):
        with self.lock:
            return self.values.pop(key, None) is not None


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setattr(peers.torch_groups, "group_store", lambda group: found)
    monkeypatch.setattr(peers.torch_groups, "group_name", lambda group: "a group")
    monkeypatch.setattr(peers.dist, "PrefixStore", lambda prefix, store: store)
    return found


def test_ranks_whose_hosts_count_restarts_differently_meet_by_the_agreed_start(
    monkeypatch, store
):
    """torchrun counts a failure only on the host of the rank that failed."""
    prefixes = set()

    def prefixed(prefix, store):
        prefixes.add(prefix.rpartition("/")[0])
        return store

    monkeypatch.setattr(peers.dist, "PrefixStore", prefixed)
    monkeypatch.setattr(_environment, "agreed_start", "one of all ranks")
    for rank in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(rank))
        peers.Peers(None, rank, 2)
    assert prefixes == {"paceline/a group/one of all ranks"}


def test_a_rank_asks_for_few_of_many_hosts_and_for_all_of_few(store):
    peers.Peers(None, 1, 4)
    assert store.asked["check"] == 3
    store.asked.clear()
    peers.Peers(None, 1, N_RANKS)
    assert store.asked["check"] < 20


def test_every_host_is_read_when_it_takes_long(store):
    for rank in range(64, N_RANKS):
        peers.Peers(None, rank, N_RANKS)
    last = peers.Peers(None, N_RANKS - 1, N_RANKS)
    for _ in range(2 * N_RANKS * N_RANKS // peers._READ_TOGETHER):
        last.check()
    assert set(last._hosts) == set(range(64, N_RANKS))


def test_messages_by_a_store_cost_each_rank_but_the_first_a_few_requests(store):
    n = 24
    every = [peers.Peers(None, rank, n) for rank in range(n)]
    received = {}

    def gather(rank):
        received[rank] = [
            every[rank].all_gather(b"%d" % (rank + k), 60.0) for k in (0, 1)
        ]

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(n)]
    store.asked.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [[b"%d" % (rank + k) for rank in range(n)] for k in (0, 1)]
    assert received == dict.fromkeys(range(n), wanted)
    assert store.asked["get"] <= 2 * 2 * n + n * n  # ... and the ranks' places
    assert sum("message" in key for key in store.values) == 1  # for late ranks


def test_ranks_that_have_sent_nothing_are_named_by_all(store):
    every = [peers.Peers(None, rank, 3) for rank in range(3)]
    for rank in (0, 2):
        with pytest.raises(_native.PeerTimeoutError, match=r"ranks \[1(, 2)?\] have"):
            every[rank].all_gather(b"here", 0.05)


def test_a_store_that_a_stopped_process_hosts_is_given_up_in_time(store):
    ranks = peers.Peers(None, 1, 2)
    ranks._seconds = 0.1
    for ask in (
        ranks.check,
        lambda: peers.Peers(None, 1, 2, 0.1),
        lambda: ranks.all_gather(b"", 60.0),
        lambda: ranks._fail_late(0, 60.0),
    ):
        with (
            store.lock,
            pytest.raises(_native.PeerTimeoutError, match="has not answered"),
        ):
            ask()
    with store.lock:
        ranks.tell_of_end(KeyboardInterrupt())


def test_ranks_that_have_taken_other_numbers_of_steps_have_other_weights():
    greeting._check_taken([4, 4, 4], 1)
    words = r"rank 1: .* \(rank 2 has taken 5, rank 0 4\), so weights differ"
    with pytest.raises(_native.MismatchError, match=words):
        greeting._check_taken([4, 4, 5], 1)
