"""If a rank raises or leaves, the others' errors name it and quote its message."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import paceline
import pytest
import torch
from jobs import failing
from support import warm
from support.ranks import run_ranks, start_ranks, tell, values

JOB = str(Path(__file__).parent / "jobs" / "failing.py")
CULPRIT = 1
OWN_WORDS = ("these are the culprit's own words", "explode_as_asked")
STEP_FAILED = ("rank {survivor}: the step of rank 1 failed", *OWN_WORDS)
LEFT = ("rank 1 (process", "has left", "same number of steps")
CASES = [  # how ranks are started, where one fails, the message of its peers
    ("fork", "late", STEP_FAILED),  # for other places see test_drawn_exceptions.py
    ("fork", "outside", OWN_WORDS),
    ("fork", "leave", LEFT),
    ("script", "hook", STEP_FAILED),
    ("script", "leave", LEFT),
    ("spawn", "outside", OWN_WORDS),
    ("forkserver", "forward", OWN_WORDS),
]


@pytest.mark.parametrize(("launch", "where", "words"), CASES)
def test_peers_are_told_why_a_rank_has_left(launch, where, words, tmp_path):
    command = [sys.executable, JOB, launch, where, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [["0"], ["1"], ["2"]] if launch == "script" else [[]]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    running = [
        warm.Popen(command + rank, env=env, text=True, **pipes) for rank in ranks
    ]
    told = [process.communicate(timeout=120) for process in running]
    output = "".join(out + err for out, err in told)
    codes = [process.returncode for process in running]
    if launch != "script":
        assert codes == [0], output
        # Use the last line: before it, Gloo of torch 2.8 may print some lines.
        codes = json.loads(told[0][0].splitlines()[-1])
    assert codes == [0, int(where != "leave"), 0], output
    assert not (tmp_path / f"error.{CULPRIT}").exists()
    for survivor in (0, 2):
        error = json.loads((tmp_path / f"error.{survivor}").read_text())
        assert (error["kind"], error["step"]) == ("PeerError", 2)
        n_begun = 2 if where in ("outside", "leave") else 3
        assert error["facts"] == [CULPRIT, n_begun, None], error
        for word in words:
            assert word.format(survivor=survivor) in error["words"]
        assert words is LEFT or "number of steps" not in error["words"]


# ---- exceptions that the rank catches ------------------------------------------------


def lack_memory():
    raise MemoryError("no room for a gradient")


class Net(failing.Net):
    explode = staticmethod(lack_memory)


def give_up_or_retry(rank, n_ranks):
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


def test_a_rank_that_retries_after_its_peers_gave_up_is_told_so():
    first, second = values(run_ranks(give_up_or_retry, 2))
    assert first[0] == "PeerError"
    assert "rank 0: the step of rank 1 failed" in first[1]
    assert second[0] == "PeerError"
    assert "rank 1: rank 0 (process" in second[1]
    assert "has left" in second[1]


def fail_while_one_is_stopped(rank, n_ranks):
    model = paceline.DistributedDataParallel(Net())
    model(torch.randn(4, 8)).sum().backward()
    if rank != 2:
        time.sleep(0.6)  # rank 2 waits in its backward and is stopped there
    tell("in the step that fails")
    model.module.where = "middle" if rank == CULPRIT else ""
    try:
        model(torch.randn(4, 8)).sum().backward()
    except (MemoryError, paceline.PeerError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_rank_that_was_stopped_is_told_the_cause_and_not_its_consequences():
    with start_ranks(fail_while_one_is_stopped, 3) as ranks:
        ranks.hear(2)
        time.sleep(0.2)
        ranks.signal(2, signal.SIGSTOP)
        ranks.hear(0)
        ranks.hear(1)
        time.sleep(0.5)  # rank 1 has raised, then rank 0, and both have left
        ranks.signal(2, signal.SIGCONT)
        first, second, third = values(ranks.wait())
    assert second[0] == "MemoryError"
    for rank, told in ((0, first), (2, third)):
        assert told[0] == "PeerError"
        assert f"rank {rank}: the step of rank 1 failed" in told[1]
        assert "no room for a gradient" in told[1]
