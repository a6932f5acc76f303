"""Checks that go wrong, for `test_doctor_apart.py`."""

import os
import subprocess
import sys
import time

from paceline._cli.doctor.finding import BlockedError, Check, ok, warning

SLEEPER = "import time; time.sleep(300)"


def hang_with_a_child():
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    print(f"child {child.pid}", flush=True)
    time.sleep(300)


def leave():
    print("on the way out", flush=True)
    os._exit(3)


def talk():
    print("x" * (1 << 20), flush=True)
    sys.stderr.write("y" * (1 << 20))
    return "said"


def raise_(error):
    raise error


def _check(name, look, judge=ok, seconds=30.0):
    return Check(name, look, judge, is_apart=True, seconds=seconds, hint="do this")


CHECKS = (
    _check("crash", os.abort),
    _check("hang", lambda: time.sleep(300), seconds=0.5),
    _check("hang_with_a_child", hang_with_a_child, seconds=3.0),
    _check("leave", leave),
    _check("give_up", lambda: raise_(SystemExit("no more"))),
    _check("fail", lambda: raise_(ValueError("two\n  lines"))),
    _check("wait_for_another", lambda: raise_(BlockedError("torch cannot be used"))),
    _check("talk", talk),
    _check(
        "say_pid", lambda: str(os.getpid()), lambda pid: warning(pid, "\u00e4 \n\t")
    ),
)
