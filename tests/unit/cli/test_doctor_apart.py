"""Checks in a separate process: a crash or a hang becomes a finding."""

import os
import sys

import odd_checks
import pytest
from paceline._cli.doctor import apart
from paceline._cli.doctor.finding import FAILED, Check, Finding, Status
from support.processes import descriptors, wait_until_gone


def checks(*names, seconds=60.0):
    return [
        Check(name, getattr(odd_checks, name), seconds, "do this") for name in names
    ]


def run(name, **options):
    (finding,) = apart.run(checks(name, **options))
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


def test_what_follows_a_crash_is_looked_at_and_one_process_serves_the_rest():
    names = ["show_pid", "crash", "show_pid", "show_pid"]
    first, crashed, *rest = apart.run(checks(*names))
    assert crashed.status is Status.PROBLEM
    assert rest[0] == rest[1] != first


def test_a_check_that_another_one_blocks_is_a_warning():
    expected = "not looked at: torch cannot be used"
    finding = run("wait_for_another")
    assert (finding.status, finding.found) == (Status.WARNING, expected)


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
    monkeypatch.setattr("multiprocessing.spawn._python_exe", b"/no/python")
    found = run("show_pid")
    assert found.status is Status.PROBLEM
    assert "no process could be started" in found.found
    monkeypatch.setattr("multiprocessing.spawn._python_exe", None)
    assert "no Python interpreter" in run("show_pid").found


def test_modules_are_found_in_the_process_as_here(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path / 'it\'s "here"'), *sys.path])
    finding = run("show_pid")
    assert finding.status is Status.WARNING
    assert int(finding.found) != os.getpid()
