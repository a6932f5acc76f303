"""A rank raises or leaves: the others name it, and say what it said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import paceline
import pytest
import torch
from support.ranks import run_ranks, start_ranks, tell, values

JOB = str(Path(__file__).parent / "jobs" / "failing.py")
CULPRIT = 1
WHERES = ("function", "hook", "early", "forward", "outside")
RAISED = (
    "rank {survivor}: the step of rank 1 failed",
    "these are the culprit's own words",
    "explode_as_asked",
)


def run_job(launch: str, where: str, folder: Path) -> tuple[list[int], list[Any], str]:
    """Return the ranks' exit codes, what each survivor caught, and all output."""
    env = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, JOB, launch, where, str(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = ["0", "1", "2"] if launch == "script" else [""]
    running = [
        subprocess.Popen(command + ([r] if r else []), env=env, text=True, **pipes)
        for r in ranks
    ]
    told = [process.communicate(timeout=120) for process in running]
    output = "".join(out + err for out, err in told)
    if launch == "script":
        codes = [process.returncode for process in running]
    else:
        assert running[0].returncode == 0, output
        # The last line: before it, Gloo of torch 2.8 tells of itself, all at once.
        codes = json.loads(told[0][0].splitlines()[-1])
    caught = []
    for rank in range(3):
        path = folder / f"error.{rank}"
        caught.append(json.loads(path.read_text()) if path.exists() else None)
    return codes, caught, output


def check_survivors(caught: list[Any], words: tuple[str, ...], output: str) -> None:
    assert caught[CULPRIT] is None
    for survivor in (0, 2):
        error = caught[survivor]
        assert error is not None, f"rank {survivor} caught nothing:\n{output}"
        assert error["kind"] == "PeerError"
        assert error["step"] == 2
        for word in words:
            assert word.format(survivor=survivor) in error["words"], error["words"]


@pytest.mark.parametrize(
    ("launch", "where"),
    [*(("fork", where) for where in WHERES), ("script", "hook"), ("script", "outside")],
)
def test_peers_get_the_traceback_of_a_rank_that_raises(
    launch: str, where: str, tmp_path: Path
) -> None:
    codes, caught, output = run_job(launch, where, tmp_path)
    words = RAISED if where in ("function", "hook", "early") else RAISED[1:]
    check_survivors(caught, words, output)
    assert not any("number of steps" in caught[rank]["words"] for rank in (0, 2))
    assert codes == [0, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "where"),
    [("spawn", "function"), ("spawn", "outside"), ("forkserver", "forward")],
)
def test_peers_get_the_traceback_of_a_rank_that_was_spawned(
    launch: str, where: str, tmp_path: Path
) -> None:
    codes, caught, output = run_job(launch, where, tmp_path)
    words = RAISED if where in ("function", "hook", "early") else RAISED[1:]
    check_survivors(caught, words, output)
    assert codes == [0, 1, 0]


@pytest.mark.parametrize("launch", ["script", "fork"])
def test_peers_learn_that_a_finished_process_has_left(
    launch: str, tmp_path: Path
) -> None:
    codes, caught, output = run_job(launch, "leave", tmp_path)
    check_survivors(caught, ("rank 1 (process", "has left"), output)
    assert codes == [0, 0, 0]


# ---- exceptions that the rank catches ------------------------------------------------


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room for a gradient")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 128)
        self.middle = torch.nn.Linear(128, 128)
        self.last = torch.nn.Linear(128, 1)
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if self.where == "late":
            hidden = Bomb.apply(hidden)
        hidden = self.middle(hidden)
        if self.where == "forward":
            raise MemoryError("no room for an activation")
        if self.where == "middle":
            hidden = Bomb.apply(hidden)
        output = self.last(hidden)
        return Bomb.apply(output) if self.where == "early" else output


def train_and_catch(rank: int, n_ranks: int, where: str, bad: int) -> dict[str, Any]:
    torch.manual_seed(7)
    model = paceline.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = {}
    generator = torch.Generator().manual_seed(rank)
    for step in range(bad + 4):
        inputs = torch.randn(4, 8, generator=generator)
        optimizer.zero_grad()
        model.module.where = where if (rank, step) == (CULPRIT, bad) else ""
        try:
            model(inputs).sum().backward()
        except Exception as error:
            errors[step] = (type(error).__name__, str(error))
            continue  # the batch is lost, on every rank
        optimizer.step()
    parameters = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return {"errors": errors, "parameters": parameters, "gradients": gradients}


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("where", ["early", "middle", "late"])
def test_training_goes_on_after_a_caught_exception_in_backward(
    where: str, bad: int, n_ranks: int
) -> None:
    told = values(run_ranks(train_and_catch, n_ranks, where, bad))
    for rank, value in enumerate(told):
        assert list(value["errors"]) == [bad], value["errors"]
        kind, words = value["errors"][bad]
        if rank == CULPRIT:
            assert kind == "MemoryError"
        else:
            assert kind == "PeerError"
            assert f"rank {rank}: the step of rank {CULPRIT} failed" in words
            assert "no room for a gradient" in words
        for name in ("parameters", "gradients"):
            assert len(value[name]) == 6
            for mine, first in zip(value[name], told[0][name], strict=True):
                assert torch.equal(mine, first)


def train_and_retry_forward(rank: int, n_ranks: int) -> torch.Tensor:
    torch.manual_seed(7)
    model = paceline.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        inputs = torch.full((4, 8), float(rank + step))
        optimizer.zero_grad()
        model.module.where = "forward" if (rank, step) == (CULPRIT, 2) else ""
        try:
            output = model(inputs)
        except MemoryError:
            model.module.where = ""
            output = model(inputs)
        output.sum().backward()
        optimizer.step()
    return model.module.middle.weight.detach().clone()


def test_a_forward_that_is_retried_disturbs_nobody() -> None:
    first, second = values(run_ranks(train_and_retry_forward, 2))
    assert torch.equal(first, second)


def give_up_or_retry(rank: int, n_ranks: int) -> tuple[str, str]:
    model = paceline.DistributedDataParallel(Net())
    for step in range(4):
        model.module.where = "middle" if (rank, step) == (CULPRIT, 1) else ""
        try:
            model(torch.randn(4, 8)).sum().backward()
        except MemoryError:
            continue
        except paceline.PeerError as error:
            return type(error).__name__, str(error)
    return "", ""


def test_a_rank_that_retries_after_its_peers_gave_up_is_told_so() -> None:
    first, second = values(run_ranks(give_up_or_retry, 2))
    assert first[0] == "PeerError"
    assert "rank 0: the step of rank 1 failed" in first[1]
    assert second[0] == "PeerError"
    assert "rank 1: rank 0 (process" in second[1]
    assert "has left" in second[1]


def fail_while_one_is_stopped(rank: int, n_ranks: int) -> tuple[str, str]:
    model = paceline.DistributedDataParallel(Net())
    model(torch.randn(4, 8)).sum().backward()
    if rank != 2:
        time.sleep(0.6)  # rank 2 waits in its backward, and is stopped there
    tell("in the step that fails")
    model.module.where = "middle" if rank == CULPRIT else ""
    try:
        model(torch.randn(4, 8)).sum().backward()
    except (MemoryError, paceline.PeerError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_rank_that_was_stopped_is_told_the_cause_and_not_its_consequences() -> None:
    with start_ranks(fail_while_one_is_stopped, 3) as ranks:
        ranks.hear(2)
        time.sleep(0.2)
        ranks.signal(2, signal.SIGSTOP)
        ranks.hear(0)
        ranks.hear(1)
        time.sleep(0.5)  # rank 1 has raised, rank 0 was told, and both have left
        ranks.signal(2, signal.SIGCONT)
        first, second, third = values(ranks.wait())
    assert second[0] == "MemoryError"
    for rank, told in ((0, first), (2, third)):
        assert told[0] == "PeerError"
        assert f"rank {rank}: the step of rank 1 failed" in told[1]
        assert "no room for a gradient" in told[1]


def lose_a_model_mismatch(rank: int, n_ranks: int) -> str:
    torch.manual_seed(1)
    with pytest.raises(paceline.MismatchError) as caught:
        paceline.DistributedDataParallel(torch.nn.Linear(4, 1 + rank // 2))
    model = paceline.DistributedDataParallel(torch.nn.Linear(4, 2))  # and again
    model(torch.ones(1, 4)).sum().backward()
    return str(caught.value)


def test_models_that_differ_are_an_error_on_every_rank() -> None:
    told = values(run_ranks(lose_a_model_mismatch, 3))
    assert len(set(told)) == 1
    assert "rank 2" in told[0]
    assert "weight" in told[0]
