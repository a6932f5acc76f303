"""Measure the host's time for each CUDA driver call: build and run driver_calls.c."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import part_build
from checks import Skip, is_fake, run_here


def nanoseconds() -> dict[str, Any]:
    program = part_build.BUILT / "driver_calls"
    program.parent.mkdir(parents=True, exist_ok=True)
    source = str(Path(__file__).with_name("driver_calls.c"))
    command = [os.environ.get("CC", "gcc"), "-O2", source, "-o", str(program), "-ldl"]
    part_build.run_command(command, part_build.ROOT)
    if is_fake():
        raise Skip("it compiles; the simulated CUDA runs no PTX")
    words = part_build.run_command([str(program)], part_build.ROOT)
    found: dict[str, Any] = json.loads(words)
    return {**found, "lines": [f"{ns} ns  {name}" for name, ns in found.items()]}


def run(seconds: float) -> bool:
    del seconds
    return run_here([("nanoseconds", nanoseconds)])
