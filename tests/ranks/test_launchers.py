"""Ranks started as users start them, and groups as users make them."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import paceline
import torch
import torch.distributed as dist
from support import warm
from support.copies import saved_and_loaded
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


# ---- groups and wrappers -------------------------------------------------------------


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


def train_in_pairs(rank: int, n_ranks: int) -> torch.Tensor:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = paceline.DistributedDataParallel(
        make_module(), process_group=pairs[rank % 2]
    )
    return gradient_of(model, float(rank))


def test_groups_of_some_ranks_are_averaged_each_for_itself() -> None:
    told = values(run_ranks(train_in_pairs, 4))
    for pair in ((0, 2), (1, 3)):
        mean = sum(gradient_of(make_module(), float(rank)) for rank in pair) / 2
        for rank in pair:
            torch.testing.assert_close(told[rank], mean)
    assert not torch.equal(told[0], told[1])


def run_forward_in_opposite_order(rank: int, n_ranks: int) -> list[torch.Tensor]:
    models = [paceline.DistributedDataParallel(make_module()) for _ in range(2)]
    for i in range(5):
        losses = {}
        for k in (0, 1) if rank == 0 else (1, 0):
            models[k].zero_grad()
            losses[k] = models[k](torch.full((2, 8), float(rank + i + k))).sum()
        (losses[0] + losses[1]).backward()
    return [model.module[1].weight.grad.clone() for model in models]


def test_one_backward_may_reach_two_wrappers_in_opposite_order() -> None:
    first, second = values(run_ranks(run_forward_in_opposite_order, 2, timeout=30))
    for k in range(2):
        assert torch.equal(first[k], second[k])
        scales = [float(rank + 4 + k) for rank in range(2)]
        mean = sum(gradient_of(make_module(), scale) for scale in scales) / 2
        torch.testing.assert_close(first[k], mean)


def travel(model: torch.nn.Module, how: str) -> torch.nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    return saved_and_loaded(model)


WAYS = ("deepcopy", "pickle", "save")


def move_wrappers(rank: int, n_ranks: int) -> list[list[torch.Tensor]]:
    return [move_a_wrapper(rank, how) for how in WAYS]


def move_a_wrapper(rank: int, how: str) -> list[torch.Tensor]:
    model = paceline.DistributedDataParallel(make_module())
    gradient_of(model, 1.0)
    other = travel(model, how)
    assert type(other) is paceline.DistributedDataParallel
    mine, theirs = list(model.parameters()), list(other.parameters())
    assert all(p is not q for p, q in zip(mine, theirs, strict=True))
    grads = [gradient_of(other, float(rank)), gradient_of(model, float(rank + 2))]
    del model
    return grads + [gradient_of(other, float(rank + 4))]


def test_a_wrapper_travels_and_both_train_on() -> None:
    both = values(run_ranks(move_wrappers, 2))
    for first, second in zip(*both, strict=True):
        for k, start in enumerate((0, 2, 4)):
            assert torch.equal(first[k], second[k])
            scales = (float(start), float(start + 1))
            mean = sum(gradient_of(make_module(), scale) for scale in scales) / 2
            torch.testing.assert_close(first[k], mean)
