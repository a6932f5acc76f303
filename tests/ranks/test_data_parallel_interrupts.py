"""After Ctrl-C at any moment of a step of DataParallel, the next step is right."""

import os
import sys
from pathlib import Path

from support import warm

JOB = Path(__file__).parent / "jobs" / "interrupted.py"
N_INTERRUPTS = 60
LONG_SECONDS = 240.0


def test_steps_after_an_interrupt_are_those_of_the_plain_module():
    done = warm.run(
        [sys.executable, str(JOB), str(N_INTERRUPTS), "1"],
        capture_output=True,
        text=True,
        timeout=LONG_SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"right after each of {N_INTERRUPTS} interrupts\n"
