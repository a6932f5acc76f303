"""Checks in a process of their own: what crashes or hangs is a finding."""

import os
import signal
import sys
import time

import odd_checks
import pytest
from paceline._cli.doctor import apart
from paceline._cli.doctor.finding import FAILED, Finding, Status
from support.processes import descriptors, is_running, wait_until_gone

CHECKS = {check.name: check for check in odd_checks.CHECKS}


@pytest.fixture
def probe():
    with apart.Probe("odd_checks") as probe:
        yield probe


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("crash", "the process that looked was ended by SIGABRT"),
        ("hang", "there was no answer after 0.5 s"),
        ("leave", "the process that looked ended with status 3: on the way out"),
    ],
)
def test_a_check_that_crashes_or_hangs_is_a_problem(probe, name, found):
    assert probe.run(CHECKS[name]) == Finding(Status.PROBLEM, found, "do this")
    assert probe.run(CHECKS["say_pid"]).status is Status.WARNING


@pytest.mark.parametrize(
    ("name", "found"),
    [("give_up", "SystemExit: no more"), ("fail", "ValueError: two lines")],
)
def test_what_a_check_raises_is_a_problem_without_a_traceback(probe, name, found):
    assert probe.run(CHECKS[name]) == Finding(Status.PROBLEM, found, FAILED)
    assert probe.run(CHECKS["say_pid"]).status is Status.WARNING


def test_a_check_that_another_one_blocks_is_a_warning(probe):
    expected = "not looked at: torch cannot be used"
    finding = probe.run(CHECKS["wait_for_another"])
    assert (finding.status, finding.found) == (Status.WARNING, expected)


def test_what_a_check_prints_neither_blocks_nor_is_taken_for_its_answer(probe):
    assert probe.run(CHECKS["talk"]) == Finding(Status.OK, "said")


def test_one_process_serves_all_checks_and_any_text(probe):
    first, second = (probe.run(CHECKS["say_pid"]) for _ in range(2))
    assert first == second == Finding(Status.WARNING, first.found, "\u00e4 \n\t")
    assert int(first.found) != os.getpid()


def test_nothing_is_left_of_a_check_that_hangs():
    before = descriptors()
    with apart.Probe("odd_checks") as probe:
        found = probe.run(CHECKS["hang_with_a_child"]).found
        child = int(found.rpartition(" ")[2])
        assert wait_until_gone([child], 5.0) == []
        pid = int(probe.run(CHECKS["say_pid"]).found)
    assert not is_running(pid)
    assert descriptors() == before


def test_a_probe_ends_when_the_doctor_is_killed():
    read, write = os.pipe()
    doctor = os.fork()
    if doctor == 0:
        probe = apart.Probe("odd_checks")
        os.write(write, probe.run(CHECKS["say_pid"]).found.encode())
        probe.run(CHECKS["hang_with_a_child"])
        os._exit(0)
    pid = int(os.read(read, 100))
    time.sleep(0.5)
    os.kill(doctor, signal.SIGKILL)
    os.waitpid(doctor, 0)
    for fd in (read, write):
        os.close(fd)
    assert wait_until_gone([pid], 5.0) == []


def test_a_process_that_cannot_be_started_is_a_problem(probe, monkeypatch):
    monkeypatch.setattr("multiprocessing.spawn._python_exe", b"/no/python")
    found = probe.run(CHECKS["say_pid"])
    assert found.status is Status.PROBLEM
    assert "no process could be started" in found.found
    monkeypatch.setattr("multiprocessing.spawn._python_exe", None)
    assert "no Python interpreter" in probe.run(CHECKS["say_pid"]).found


def test_modules_are_found_in_the_process_as_here(probe, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path / 'it\'s "here"'), *sys.path])
    assert probe.run(CHECKS["say_pid"]).status is Status.WARNING
