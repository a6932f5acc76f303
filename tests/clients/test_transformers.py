"""transformers' Trainer under torchrun, and alone with replicas of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import (
    DEADLINE_SECONDS,
    HERE,
    alone,
    by_torchrun,
    check_equal,
    check_resumes,
    check_saved,
    end_all,
    needs,
    run,
    start,
)
from support.clients import transformers_or_skip

pytestmark = needs("accelerate", "transformers")
transformers_or_skip()
PROGRAM = "transformers_trainer.py"


@pytest.mark.long
def test_the_trainer_trains_and_resumes_alike(tmp_path: Path) -> None:
    plain = run("torch", by_torchrun, PROGRAM, tmp_path / "torch")
    resume = ("--resume", plain.path)
    ours = run("paceline", by_torchrun, PROGRAM, tmp_path / "ours", *resume)
    check_equal(plain, ours)
    check_resumes(plain, ours)
    files = ("optimizer.pt", "scheduler.pt", "model.safetensors")
    check_saved(plain, ours, *(f"run/checkpoint-3/{name}" for name in files))


def test_the_trainers_own_data_parallel_trains_as_the_plain_model(
    tmp_path: Path,
) -> None:
    program = HERE / "programs" / "transformers_data_parallel.py"
    (tmp_path / "watch").mkdir()
    command = alone("paceline", program, ["--out", str(tmp_path / "run")])
    process, mark = start(command, tmp_path)
    try:
        code = process.wait(DEADLINE_SECONDS)
    finally:
        left = end_all(mark)
    text = (tmp_path / "output.txt").read_text()
    assert code == 0, text
    assert "alike by paceline 2" in text
    assert not left
