"""Checks that crash or hang, for `test_doctor_apart.py`."""

import faulthandler
import os
import subprocess
import sys
import time

from paceline._cli.doctor.finding import ok, warning

SLEEPER = "import time; time.sleep(300)"


def crash():
    faulthandler.disable()  # of pytest, which would report it
    os.abort()


def hang():
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


def talk():
    print("x" * (1 << 20), flush=True)
    sys.stderr.write("y" * (1 << 20))
    return ok("\u00e4 \n\t")


def show_pid():
    return warning(str(os.getpid()), "a pid")
