"""Waits of Python's side leave out time in which their process was stopped."""

import time

import pytest
from paceline import _waiting


@pytest.mark.parametrize(
    ("looks", "left"),
    [
        ([0.1, 0.2], 0.8),  # seconds after the start
        ([0.1, 60.1], 0.7),  # stopped for a minute
        ([60.0, 120.0, 180.0, 240.0, 300.0, 300.1], -0.1),  # again and again
    ],
)
def test_a_wait_counts_little_of_a_time_in_which_it_did_not_look(
    looks, left, monkeypatch
):
    clock = iter([0.0, *looks])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    patience = _waiting.Patience(1.0)
    assert [patience.left() for _ in looks][-1] == pytest.approx(left)
