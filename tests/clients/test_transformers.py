"""transformers' Trainer under torchrun."""

from __future__ import annotations

from pathlib import Path

from launches import by_torchrun, check_equal, check_resumes, needs, run

pytestmark = needs("accelerate", "transformers")
PROGRAM = "transformers_trainer.py"


def test_the_trainer_trains_and_resumes_alike(tmp_path: Path) -> None:
    plain = run("torch", by_torchrun, PROGRAM, tmp_path / "torch")
    resume = ("--resume", plain.path)
    ours = run("paceline", by_torchrun, PROGRAM, tmp_path / "ours", *resume)
    check_equal(plain, ours)
    check_resumes(plain, ours)
    resume = ("--resume", ours.path)
    check_resumes(plain, run("torch", by_torchrun, PROGRAM, tmp_path / "back", *resume))
