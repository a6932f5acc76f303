"""Whether replicas can pay: what is logged for times that a test makes up."""

import logging

import paceline
import pytest
from paceline._dp import check
from paceline._dp.process import payoff as call_payoff
from paceline._dp.process.payoff import N_CALLS, N_SKIPPED, Payoff
from torch import nn, ones


class Clock:
    """Stands still until a test moves it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(payoff, clock, before, own, after):
    with payoff.call():
        clock.now += before
        payoff.replica_0_begins()
        clock.now += own
        payoff.replica_0_ends()
        clock.now += after


def fail(payoff, clock):
    with payoff.call():
        clock.now += 100.0
        raise LookupError


def lines_of(caplog, times, n_replicas=2, n_calls=N_SKIPPED + N_CALLS + 5):
    clock = Clock()
    payoff = Payoff(n_replicas, clock)
    with caplog.at_level(logging.INFO, "paceline"):
        for _ in range(n_calls):
            run(payoff, clock, *times)
    return [record.getMessage() for record in caplog.records]


def test_what_cannot_pay_is_told_once_with_its_numbers(caplog):
    (line,) = lines_of(caplog, (0.25e-3, 0.5e-3, 0.5e-3))
    assert line == (
        "a forward takes 1.25 ms with 2 replicas, of which replica 0's part of the "
        "batch is 0.50 ms: 2 such parts in a row would take less, so DataParallel "
        "is not faster than the plain module here"
    )


@pytest.mark.parametrize(
    ("times", "n_replicas"),
    [((0.25, 1.0, 0.25), 2), ((0.25, 0.5, 0.5), 3), ((0.0, 1.0, 1.0), 2)],
    ids=["it pays", "more replicas", "as fast"],
)
def test_nothing_is_said_where_replicas_may_pay(caplog, times, n_replicas):
    assert lines_of(caplog, times, n_replicas) == []


def test_nothing_is_said_before_there_are_enough_calls(caplog):
    n_calls = N_SKIPPED + N_CALLS - 1
    assert lines_of(caplog, (1.0, 1.0, 1.0), n_calls=n_calls) == []


def test_the_first_calls_and_those_that_fail_do_not_count(caplog):
    clock = Clock()
    payoff = Payoff(2, clock)
    with caplog.at_level(logging.INFO, "paceline"):
        for _ in range(N_SKIPPED):
            run(payoff, clock, 100.0, 1.0, 100.0)
        for _ in range(N_CALLS):
            with pytest.raises(LookupError):
                fail(payoff, clock)
            run(payoff, clock, 0.25, 1.0, 0.25)
    assert payoff.is_over
    assert caplog.records == []


def test_calls_of_a_wrapper_are_timed(caplog, monkeypatch):
    monkeypatch.setattr(call_payoff.statistics, "median", lambda some: len([*some]))
    with (
        caplog.at_level(logging.INFO, "paceline"),
        paceline.DataParallel(nn.Linear(1, 1), ["cpu"] * 2) as model,
    ):
        for _ in range(N_SKIPPED + N_CALLS + 2):
            model(ones(4, 1))
    (record,) = caplog.records  # the medians stand for how many numbers there are
    assert record.args == (1000 * N_CALLS, 2, 1000 * N_CALLS, 2)


@pytest.mark.parametrize(
    ("of_replicas", "words"),
    [
        (2.0, "2e+03 ms with 2 replicas, 1e+03 ms plain: 0.50 times"),
        (0.5, "2.00 times"),
    ],
)
def test_check_tells_how_long_a_step_takes(monkeypatch, of_replicas, words):
    ends = [0.0]

    def clock():  # it is asked before and after the step of each, in turns
        n = len(ends) - 1
        ends.append(ends[-1] + [1.0, 0.0, of_replicas, 0.0][n % 4])
        return ends[n]

    monkeypatch.setattr(check, "_clock", clock)
    report = paceline.check(nn.Linear(3, 2), ones(4, 3), engine="thread")
    (note,) = report.notes
    assert words in note
    assert note.endswith("replicas do not pay here") is (of_replicas > 1.0)
    assert note in str(report)
    assert paceline.check(nn.Linear(3, 2), ones(4, 3), replicas=1).notes == []
