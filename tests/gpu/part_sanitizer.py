"""compute-sanitizer over copies between contexts, kernels, and a step of replicas."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from checks import Skip, run_here

PART = str(Path(__file__).with_name("part.py"))
N_WORDS = 3000
# Tool, part, the checks of it; the most telling first.
RUNS = [
    ("memcheck", "contexts", ""),
    ("racecheck", "contexts", "sums"),
    ("memcheck", "kernels", "nvrtc.copies"),
    ("memcheck", "kernels", "nvrtc.additions"),
    ("racecheck", "kernels", "nvrtc.additions"),
    ("memcheck", "replicas", "train_mlp"),
    ("memcheck", "kernels", ""),
]


def find() -> str:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [f"{home}/bin" for home in (*homes, "/usr/local/cuda") if home]
    path = os.pathsep.join([os.environ.get("PATH", ""), *places])
    tool = shutil.which("compute-sanitizer", path=path)
    if tool is None:
        raise Skip("there is no compute-sanitizer")
    return tool


def under(tool: str, part: str, only: str, until: float) -> dict[str, Any]:
    """Run checks of a part, of which the tool must have nothing to say."""
    command = [find(), "--tool", tool, "--target-processes", "all"]
    command += ["--error-exitcode", "99", sys.executable, PART, part]
    env = {"PACELINE_GPU_ONLY": only, "PACELINE_GPU_QUICK": "1"}
    env["PACELINE_GPU_RECORD"] = ""
    left = until - time.monotonic()
    if left < 10:
        raise Skip("no time was left")
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=left,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Skip(f"not done after {left:.0f} s, nothing said before") from None
    assert done.returncode == 0, done.stdout[-N_WORDS:]
    assert "passed" in done.stdout, f"nothing was checked: {done.stdout[-N_WORDS:]}"
    return {"summary": done.stdout.rstrip().rpartition("\n")[2]}


def checks(until: float) -> Iterator[tuple[str, Any]]:
    for tool, part, only in RUNS:
        name = f"{tool} of {part} {only}".rstrip()
        yield name, partial(under, tool, part, only, until)


def run(seconds: float) -> bool:
    return run_here(checks(time.monotonic() + seconds - 15))
