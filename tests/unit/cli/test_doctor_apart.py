"""Checks in a forked process: a crash or a hang becomes a finding."""

import os

import odd_checks
import pytest
from paceline._cli.doctor import apart
from paceline._cli.doctor.finding import FAILED, Check, Finding, Status
from support.processes import descriptors, wait_until_gone


def checks(*names, needs=""):
    return [Check(name, getattr(odd_checks, name), "do this", needs) for name in names]


def run(name, seconds=60.0):
    (finding,) = apart.run(checks(name), seconds)
    return finding


@pytest.mark.parametrize(
    ("name", "found", "advice"),
    [
        ("crash", "the check's process was ended by SIGABRT", "do this"),
        ("leave", "the check's process ended with status 3: on the way", "do this"),
        ("give_up", "SystemExit: no more", FAILED),
        ("fail", "ValueError: two lines", FAILED),
    ],
)
def test_a_check_that_crashes_or_raises_is_a_problem(name, found, advice):
    finding = run(name)
    assert (finding.status, finding.advice) == (Status.PROBLEM, advice)
    assert finding.found.startswith(found)


def assert_skipped(finding, because):
    expected = f"not looked at, because of {because}"
    assert (finding.status, finding.found) == (Status.WARNING, expected)


def test_one_process_makes_all_checks_and_none_after_a_crash():
    names = ["show_pid", "show_pid", "crash", "show_pid", "show_pid"]
    first, second, crashed, *rest = apart.run(checks(*names))
    assert first == second
    assert int(first.found) != os.getpid()
    assert crashed.status is Status.PROBLEM
    for finding in rest:
        assert_skipped(finding, "crash")


@pytest.mark.parametrize("name", ["fail", "show_pid"])
def test_a_check_that_needs_another_is_skipped_after_its_problem_alone(name):
    needing = Check("needing", odd_checks.show_pid, needs=name)
    again = Check("again", odd_checks.show_pid, needs="needing")
    first, *others = apart.run([*checks(name), needing, again])
    if name == "show_pid":
        assert others == [first, first]
    else:
        assert_skipped(others[0], "fail")
        assert_skipped(others[1], "needing")


def test_what_a_check_prints_neither_blocks_nor_is_taken_for_its_answer():
    assert run("talk") == Finding(Status.OK, "\u00e4 \n\t")


def test_nothing_is_left_of_a_check_that_hangs():
    before = descriptors()
    finding = run("hang", seconds=3.0)
    assert finding.status is Status.PROBLEM
    assert finding.found.startswith("no answer after 3 s: child ")
    child = int(finding.found.rpartition(" ")[2])
    assert wait_until_gone([child], 5.0) == []
    assert descriptors() == before


def test_a_process_that_cannot_be_started_is_a_problem(monkeypatch):
    def fork():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before = descriptors()
    monkeypatch.setattr(os, "fork", fork)
    found = run("show_pid")
    assert found.status is Status.PROBLEM
    assert "no process could be started" in found.found
    assert descriptors() == before
