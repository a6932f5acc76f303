"""accelerate, transformers, Lightning and ignite train as with torch, and resume."""

from __future__ import annotations

import pytest
from launches import (
    HERE,
    Run,
    alone,
    by_accelerate,
    by_torchrun,
    check_equal,
    check_ranks_agree,
    check_resumes,
    check_saved,
    run,
    with_accelerate,
)
from support.clients import (
    DEADLINE_SECONDS,
    end_all,
    needs,
    start,
    transformers_or_skip,
)
from support.ports import free_port

accelerate = needs("accelerate", "sklearn")
ignite = needs("ignite")
lightning = needs("lightning", "torchmetrics", "sklearn")
transformers = needs("accelerate", "transformers")
LOOP, NOTEBOOK, IGNITE = (
    "accelerate_loop.py",
    "accelerate_notebook.py",
    "ignite_loop.py",
)
TRAINER, FABRIC, GPT = (
    "lightning_trainer.py",
    "fabric_loop.py",
    "transformers_trainer.py",
)


def port_for(program: str) -> list[str]:
    return ["--port", str(free_port())] if program in (NOTEBOOK, IGNITE) else []


# ---- that our wrapper is used --------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "title", "args"),
    [
        pytest.param(NOTEBOOK, "", [], marks=accelerate),
        pytest.param(
            IGNITE, "train", ["--start", "fork"], marks=[ignite, pytest.mark.long]
        ),
        pytest.param(
            TRAINER, "train", ["--short"], marks=[lightning, pytest.mark.long]
        ),
    ],
)
def test_a_short_training_has_our_wrapper_on_both_ranks(tmp_path, program, title, args):
    args = [*args, *port_for(program)]
    is_notebook = program == NOTEBOOK
    folder = tmp_path / "out"
    done = run("paceline", alone, program, folder, *args, has_install_line=is_notebook)
    check_ranks_agree(done, title)


@transformers
def test_the_trainers_own_data_parallel_trains_as_the_plain_model(tmp_path):
    transformers_or_skip()
    (tmp_path / "watch").mkdir()
    args = ["--out", str(tmp_path / "run"), "--replicas"]
    command = alone("paceline", HERE / "programs" / GPT, args)
    process, mark = start(command, tmp_path)
    try:
        code = process.wait(DEADLINE_SECONDS)
    finally:
        left = end_all(mark)
    text = (tmp_path / "output.txt").read_text()
    assert code == 0, text
    assert "alike by paceline 2" in text
    assert not left


# ---- comparisons with torch ----------------------------------------------------------

OF_GPT = ("optimizer.pt", "scheduler.pt", "model.safetensors")


@pytest.mark.long
@pytest.mark.parametrize(
    ("launch", "program", "saved"),
    [
        pytest.param(alone, IGNITE, ["kept/checkpoint_8.pt"], marks=ignite),
        pytest.param(alone, FABRIC, ["state.ckpt"], marks=lightning),
        pytest.param(
            by_torchrun,
            GPT,
            [f"run/checkpoint-3/{name}" for name in OF_GPT],
            marks=transformers,
        ),
    ],
)
def test_a_library_trains_alike_and_resumes_from_a_checkpoint_of_torch(
    tmp_path, launch, program, saved
):
    if program == GPT:
        transformers_or_skip()
    args = port_for(program)
    plain = run("torch", launch, program, tmp_path / "torch", *args)
    resume = (*args, "--resume", plain.path)
    ours = run("paceline", launch, program, tmp_path / "ours", *resume)
    check_equal(plain, ours)
    check_resumes(plain, ours)
    check_saved(plain, ours, *saved)


@pytest.mark.long
@accelerate
def test_a_loop_with_accelerate_trains_and_resumes_alike(tmp_path):
    ours = run("paceline", by_accelerate, LOOP, tmp_path / "ours")
    resume = ("--resume", ours.path)
    plain = run("torch", by_accelerate, LOOP, tmp_path / "torch", *resume)
    check_equal(plain, ours)
    check_resumes(ours, plain)
    # The environment carries Paceline into all other processes of accelerate.
    resume = ("--resume", plain.path)
    again = run("paceline", with_accelerate, LOOP, tmp_path / "again", *resume)
    check_resumes(plain, again)


@pytest.mark.long
@accelerate
def test_a_function_in_a_notebook_trains_alike(tmp_path):
    runs = []
    for library in ("torch", "paceline"):
        args, folder = port_for(NOTEBOOK), tmp_path / library
        runs.append(run(library, alone, NOTEBOOK, folder, *args, has_install_line=True))
    check_equal(*runs)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run("torch", alone, TRAINER, tmp_path_factory.mktemp("lightning") / "torch")


@pytest.mark.long
@lightning
def test_the_script_that_lightning_runs_again_trains_alike(plain, tmp_path):
    ours = run("paceline", alone, TRAINER, tmp_path / "ours")
    check_equal(plain, ours)
    check_saved(plain, ours, "kept/epoch=0.ckpt", "kept/epoch=1.ckpt")


@pytest.mark.long
@lightning
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_lightnings_spawned_and_forked_ranks_go_on_from_a_checkpoint_of_torch(
    plain, tmp_path, strategy
):
    args = ("--strategy", strategy, "--resume", plain.path)
    is_notebook = strategy == "ddp_notebook"
    folder = tmp_path / strategy
    resumed = run(
        "paceline", alone, TRAINER, folder, *args, has_install_line=is_notebook
    )
    check_resumes(plain, resumed, "train")
