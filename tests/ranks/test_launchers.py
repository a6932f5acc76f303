"""Ranks started as users start them, and groups as users make them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import paceline
import torch
from support import warm
from support.ports import free_port
from support.ranks import run_ranks, values

JOB = str(Path(__file__).parent / "jobs" / "training.py")
ENV = dict(os.environ, OMP_NUM_THREADS="1")
SECONDS = 120

# Gloo's threads outlive their group, and now and then torch aborts a process that ends
# among them, with paceline or without: such a run tells nothing.
TORCH_ABORTS = "terminate called without an active exception"
TRIES = 5


def run_until_torch_survives(
    start: Callable[[], tuple[list[int], str, str]],
) -> tuple[str, str]:
    """Return what a run printed, once torch itself has not aborted it."""
    for _ in range(TRIES):
        codes, out, err = start()
        if TORCH_ABORTS not in err:
            break
    assert not any(codes), err
    return out, err


def run_command(command: list[str]) -> tuple[list[int], str, str]:
    done = warm.run(command, env=ENV, capture_output=True, text=True, timeout=SECONDS)
    return [done.returncode], done.stdout, done.stderr


def check_output(out: str, err: str, n_ranks: int) -> None:
    done = re.findall(r"rank (\d) of (\d) is done: ([0-9a-f]{16})", out)
    assert sorted(rank for rank, _, _ in done) == [str(r) for r in range(n_ranks)]
    assert len({total for _, _, total in done}) == 1
    # Gloo and the launcher may say something; we and the interpreter do not.
    assert not re.findall(r"(?i)paceline|traceback|warning|exception", err), err


def test_spawn_runs_an_unchanged_script() -> None:
    out, err = run_until_torch_survives(
        lambda: run_command([sys.executable, JOB, str(free_port())])
    )
    check_output(out, err, 2)


def run_plain_processes() -> tuple[list[int], str, str]:
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    running = [
        warm.Popen(
            [sys.executable, JOB],
            env={**ENV, **meeting, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=SECONDS) for process in running]
    codes = [process.returncode for process in running]
    return codes, "".join(out for out, _ in told), "".join(err for _, err in told)


def test_plain_processes_meet_over_the_environment() -> None:
    out, err = run_until_torch_survives(run_plain_processes)
    check_output(out, err, 2)


# ---- many ranks ----------------------------------------------------------------------


def make_module() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 128), torch.nn.Linear(128, 128))


def gradient_of(model: torch.nn.Module, scale: float) -> torch.Tensor:
    model.zero_grad()
    model(torch.full((2, 8), scale)).sum().backward()
    last = list(model.parameters())[-2]
    assert last.grad is not None
    return last.grad.clone()


def train_some(rank: int, n_ranks: int) -> torch.Tensor:
    model = paceline.DistributedDataParallel(make_module())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for i in range(10):
        gradient_of(model, float(rank + i))
        optimizer.step()
    return model.module[1].weight.detach().clone()


def test_eight_ranks_share_few_cores() -> None:
    weights = values(run_ranks(train_some, 8, timeout=120))
    assert all(torch.equal(weight, weights[0]) for weight in weights)
