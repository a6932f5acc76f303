"""compute-sanitizer over copies between contexts, kernels, and a step of replicas."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import part_build
from checks import Skip, run_here

PART = str(Path(__file__).with_name("part.py"))
N_WORDS = 3000
# The tool, the part, its checks; the most informative first.
RUNS = [
    ("memcheck", "contexts", ""),
    ("racecheck", "contexts", "sums"),
    ("memcheck", "kernels", "nvrtc.copies"),
    ("memcheck", "kernels", "nvrtc.additions"),
    ("racecheck", "kernels", "nvrtc.additions"),
    ("memcheck", "replicas", "train_mlp"),
    ("memcheck", "kernels", ""),
]


def under(tool: str, part: str, only: str, until: float) -> dict[str, Any]:
    """Run checks of a part under a tool, which must report nothing."""
    sanitizer = part_build.find_tool("compute-sanitizer")
    if sanitizer is None:
        raise Skip("there is no compute-sanitizer")
    command = [sanitizer, "--tool", tool, "--target-processes", "all"]
    command += ["--error-exitcode", "99", sys.executable, PART, part]
    env = {"PACELINE_GPU_ONLY": only, "PACELINE_GPU_QUICK": "1"}
    env["PACELINE_GPU_RECORD"] = ""
    left = until - time.monotonic()
    if left < 10:
        raise Skip("no time was left")
    try:
        words = part_build.run_command(command, part_build.ROOT, left, **env)
    except subprocess.TimeoutExpired:
        raise Skip(f"not done after {left:.0f} s, without a report before") from None
    assert "passed" in words, f"nothing was checked: {words[-N_WORDS:]}"
    return {"summary": words.rstrip().rpartition("\n")[2]}


def checks(until: float) -> Iterator[tuple[str, Any]]:
    for tool, part, only in RUNS:
        name = f"{tool} of {part} {only}".rstrip()
        yield name, partial(under, tool, part, only, until)


def run(seconds: float) -> bool:
    return run_here(checks(time.monotonic() + seconds - 15))
