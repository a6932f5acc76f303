"""ignite, which spawns its ranks."""

from __future__ import annotations

from pathlib import Path

from launches import (
    alone,
    check_equal,
    check_resumes,
    check_saved,
    needs,
    run,
)
from support.ports import free_port

pytestmark = needs("ignite", "sklearn")
PROGRAM = "ignite_loop.py"


def test_a_trainer_of_ignite_trains_and_resumes_alike(tmp_path: Path) -> None:
    args = ("--port", str(free_port()))
    plain = run("torch", alone, PROGRAM, tmp_path / "torch", *args)
    resume = (*args, "--resume", plain.path)
    ours = run("paceline", alone, PROGRAM, tmp_path / "ours", *resume)
    check_equal(plain, ours)
    check_resumes(plain, ours)
    check_saved(plain, ours, "kept/checkpoint_8.pt")
