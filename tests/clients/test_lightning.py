"""Lightning: its Trainer by each strategy, Fabric, torchmetrics in their loops."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import (
    Run,
    alone,
    check_equal,
    check_ranks_agree,
    check_resumes,
    check_saved,
    needs,
    run,
)

pytestmark = needs("lightning", "torchmetrics", "sklearn")
TRAINER, FABRIC = "lightning_trainer.py", "fabric_loop.py"


def test_a_short_training_has_our_wrapper_on_both_ranks(tmp_path: Path) -> None:
    check_ranks_agree(
        run("paceline", alone, TRAINER, tmp_path / "out", "--short"), "train"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Run:
    return run("torch", alone, TRAINER, folder / "torch")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Run:
    return run("paceline", alone, TRAINER, folder / "ours")


@pytest.mark.long
def test_the_script_that_lightning_runs_again_trains_alike(
    plain: Run, ours: Run
) -> None:
    check_equal(plain, ours)
    check_saved(plain, ours, "kept/epoch=0.ckpt", "kept/epoch=1.ckpt")


@pytest.mark.long
def test_the_spawned_ranks_go_on_from_a_checkpoint_of_torch(
    plain: Run, folder: Path
) -> None:
    args = ("--strategy", "ddp_spawn", "--resume", plain.path)
    resumed = run("paceline", alone, TRAINER, folder / "spawned", *args)
    check_resumes(plain, resumed, "train")


@pytest.mark.long
def test_the_forked_ranks_of_a_notebook_go_on_from_a_checkpoint_of_torch(
    plain: Run, folder: Path
) -> None:
    args = ("--strategy", "ddp_notebook", "--resume", plain.path)
    resumed = run(
        "paceline", alone, TRAINER, folder / "forked", *args, has_install_line=True
    )
    check_resumes(plain, resumed, "train")


@pytest.mark.long
def test_a_loop_with_fabric_trains_and_resumes_alike(tmp_path: Path) -> None:
    plain = run("torch", alone, FABRIC, tmp_path / "torch")
    ours = run("paceline", alone, FABRIC, tmp_path / "ours", "--resume", plain.path)
    check_equal(plain, ours)
    check_resumes(plain, ours)
    check_saved(plain, ours, "state.ckpt")
