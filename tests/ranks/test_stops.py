"""Ranks that are slow, stopped, interrupted, or done before the others."""

from __future__ import annotations

import signal
import time
from typing import Any

import paceline
import pytest
import torch
from support.ranks import run_ranks, start_ranks, tell, values

DEADLINE = 1.5
ENV = {"PACELINE_TIMEOUT": str(DEADLINE)}


def make_model() -> torch.nn.Module:
    layers = [torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128)]
    return paceline.DistributedDataParallel(torch.nn.Sequential(*layers))


def step(model: torch.nn.Module) -> None:
    model(torch.randn(8, 32)).sum().backward()


def train_for(rank: int, n_ranks: int, seconds: float) -> dict[str, Any]:
    model = make_model()
    step(model)
    tell("running")
    begin = time.monotonic()
    caught: tuple[str, str] = ("", "")
    n_steps = 0
    last = torch.zeros(1)
    # Every rank stops after the same step: the ranks agree on the time by a gradient.
    while not last.item():
        try:
            step(model)
            n_steps += 1
            if time.monotonic() - begin > seconds + 5.0:
                break
            late = torch.nn.Parameter(torch.zeros(1))
            late.grad = torch.tensor([float(time.monotonic() - begin > seconds)])
            last = late.grad if n_ranks == 1 else agree(late.grad)
        except paceline.PeerError as error:
            caught = (type(error).__name__, str(error))
            break
    return {"caught": caught, "at": time.monotonic(), "n_steps": n_steps}


def agree(flag: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(flag)
    return flag


def train_until_an_error(rank: int, n_ranks: int) -> dict[str, Any]:
    model = make_model()
    step(model)
    tell("running")
    while True:
        try:
            step(model)
        except paceline.PeerError as error:
            words = (type(error).__name__, str(error))
            return {"caught": words, "at": time.monotonic()}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_at_the_deadline(victim: int) -> None:
    with start_ranks(train_until_an_error, 3, env=ENV) as ranks:
        for rank in range(3):
            ranks.hear(rank)
        stopped_at = ranks.signal(victim, signal.SIGSTOP)
        time.sleep(2 * DEADLINE)
        ranks.signal(victim, signal.SIGCONT)
        outcomes = values(ranks.wait())
    for rank, value in enumerate(outcomes):
        kind, words = value["caught"]
        assert kind == "PeerTimeoutError"
        if rank != victim:
            seconds = value["at"] - stopped_at
            assert DEADLINE - 0.1 < seconds < DEADLINE + 1.0
            assert words.startswith(f"rank {rank}: rank {victim} (process ")
            assert "beyond the deadline" in words


def test_a_short_stop_is_waited_for() -> None:
    with start_ranks(train_for, 2, 2.0, env=ENV) as ranks:
        for rank in range(2):
            ranks.hear(rank)
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(0.6 * DEADLINE)
        ranks.signal(1, signal.SIGCONT)
        first, second = values(ranks.wait())
    assert first["caught"] == second["caught"] == ("", "")
    assert first["n_steps"] == second["n_steps"]


# ---- done before the others ---------------------------------------------------------


def train_unevenly(rank: int, n_ranks: int, end: str) -> dict[str, Any]:
    model = make_model()
    caught: dict[str, Any] = {}
    for i in range(3 if rank == 1 else 6):
        try:
            step(model)
        except paceline.PeerError as error:
            caught = {"kind": type(error).__name__, "words": str(error), "step": i}
            break
    if rank == 1 and end == "lives on":
        module = model.module
        del model
        for _ in range(3):
            module(torch.randn(8, 32)).sum().backward()
        time.sleep(0.5)
    return caught


@pytest.mark.parametrize("end", ["returns", "lives on"])
def test_a_rank_with_fewer_steps_is_said_to_have_left(end: str) -> None:
    told = values(run_ranks(train_unevenly, 3, end))
    assert told[1] == {}
    for rank in (0, 2):
        assert told[rank]["kind"] == "PeerError"
        assert told[rank]["step"] == 3
        assert "rank 1 (process" in told[rank]["words"]
        assert "has left" in told[rank]["words"]
        assert "same number of steps" in told[rank]["words"]


# ---- Ctrl-C -------------------------------------------------------------------------


def wait_for_an_interrupt(rank: int, n_ranks: int, where: str) -> dict[str, Any]:
    model = make_model()
    step(model)
    if rank != 0:
        time.sleep(1.0)
    tell("about to wait")
    try:
        if where == "backward":
            step(model)
        else:
            make_model()
    except (KeyboardInterrupt, paceline.PeerError) as error:
        return {"kind": type(error).__name__, "at": time.monotonic(), "w": str(error)}
    return {"kind": ""}


def test_an_interrupt_ends_a_wait_in_backward_at_once() -> None:
    with start_ranks(wait_for_an_interrupt, 2, "backward") as ranks:
        ranks.hear(0)
        time.sleep(0.3)
        interrupted_at = ranks.signal(0, signal.SIGINT)
        first, second = values(ranks.wait())
    assert first["kind"] == "KeyboardInterrupt"
    assert first["at"] - interrupted_at < 0.3
    assert second["kind"] == "PeerError"
    assert "rank 0" in second["w"]


def test_an_interrupt_ends_a_wait_in_construction_at_once() -> None:
    with start_ranks(
        wait_for_an_interrupt, 2, "construction", group_timeout=5.0, timeout=30.0
    ) as ranks:
        ranks.hear(0)
        time.sleep(0.3)
        interrupted_at = ranks.signal(0, signal.SIGINT)
        outcomes = ranks.wait()
    first = outcomes[0].value
    assert first["kind"] == "KeyboardInterrupt"
    assert first["at"] - interrupted_at < 0.3
    # The other rank comes to a construction that nobody joins.
    assert outcomes[1].value["kind"] == "PeerError"
