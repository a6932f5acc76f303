"""ignite, which spawns its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import (
    alone,
    check_equal,
    check_ranks_agree,
    check_resumes,
    check_saved,
    needs,
    run,
)
from support.ports import free_port

pytestmark = needs("ignite", "sklearn")
PROGRAM = "ignite_loop.py"


def test_a_short_training_has_our_wrapper_on_both_ranks(tmp_path: Path) -> None:
    args = ("--port", str(free_port()), "--start", "fork")
    done = run("paceline", alone, PROGRAM, tmp_path / "out", *args)
    check_ranks_agree(done, "train")


@pytest.mark.long
def test_a_trainer_of_ignite_trains_and_resumes_alike(tmp_path: Path) -> None:
    args = ("--port", str(free_port()))
    plain = run("torch", alone, PROGRAM, tmp_path / "torch", *args)
    resume = (*args, "--resume", plain.path)
    ours = run("paceline", alone, PROGRAM, tmp_path / "ours", *resume)
    check_equal(plain, ours)
    check_resumes(plain, ours)
    check_saved(plain, ours, "kept/checkpoint_8.pt")
