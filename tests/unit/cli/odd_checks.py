"""Checks that go wrong, for `test_doctor_apart.py`."""

import os
import subprocess
import sys
import time

from paceline._cli.doctor.finding import BlockedError, Check, ok, warning

SLEEPER = "import time; time.sleep(300)"


def crash():
    os.abort()


def hang():
    time.sleep(300)


def hang_with_a_child():
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    print(f"child {child.pid}", flush=True)
    time.sleep(300)


def leave():
    print("on the way out", flush=True)
    os._exit(3)


def give_up():
    raise SystemExit("no more")


def fail():
    raise ValueError("two\n  lines")


def wait_for_another():
    raise BlockedError("torch cannot be used")


def talk():
    print("x" * (1 << 20), flush=True)
    sys.stderr.write("y" * (1 << 20))
    return "said"


def say_pid():
    return str(os.getpid())


def _check(look, judge=ok, seconds=30.0):
    name = look.__name__
    return Check(name, look, judge, is_apart=True, seconds=seconds, hint="do this")


CHECKS = (
    _check(crash),
    _check(hang, seconds=0.5),
    _check(hang_with_a_child, seconds=3.0),
    _check(leave),
    _check(give_up),
    _check(fail),
    _check(wait_for_another),
    _check(talk),
    _check(say_pid, lambda pid: warning(pid, "\u00e4 \n\t")),
)
