"""Run code in a fresh Python process."""

import subprocess
import sys


def run_python(code, *words, flags=(), check=True, timeout=120, **options):
    """Run code; fail with all of its output if its exit status is not 0."""
    command = [sys.executable, *flags, "-c", code, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, **options
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done
