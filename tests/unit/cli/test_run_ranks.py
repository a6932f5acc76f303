"""`paceline run -n`: the arguments and environment of torchrun."""

import os
import re

import pytest
import torch
from paceline import _cgroup
from paceline._cli import run

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Simulate a machine of 8 cores and 3 GPUs with an empty environment."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(_cgroup, "cpu_quota", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


def environ():
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}


@pytest.mark.parametrize(
    ("n", "rest", "n_ranks", "n_threads"),
    [
        ("", ["2", "train.py", "-n", "3"], "2", "4"),
        (
            "3",
            ["--max-restarts", "3", "-m", "package.train", "--nnodes", "2"],
            "3",
            "2",
        ),
        ("", ["gpu", "--tee", "3", "train.py"], "3", "2"),
    ],
)
def test_ranks_share_the_cores_and_other_options_are_torchruns(
    n, rest, n_ranks, n_threads
):
    found = run._as_ranks(n, rest)
    passed_on = rest if n else rest[1:]
    assert found == [*TORCHRUN, f"--nproc-per-node={n_ranks}", *passed_on]
    secret = os.environ.pop("PACELINE_SECRET")
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert environ() == {"OMP_NUM_THREADS": n_threads, "GLOO_SOCKET_IFNAME": "lo"}
    run._as_ranks(n, rest)
    assert os.environ["PACELINE_SECRET"] != secret


def test_what_the_user_has_set_and_the_containers_share_count(monkeypatch):
    monkeypatch.setattr(_cgroup, "cpu_quota", lambda: 4.5)
    own = {"GLOO_SOCKET_IFNAME": "eth0", "PACELINE_SECRET": "word"}
    os.environ.update(own)
    assert "word" not in run._as_ranks("2", ["train.py"])
    assert environ() == {"OMP_NUM_THREADS": "2", **own}


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (["gpu", "train.py"], "-n gpu: torch sees no GPU here .*: give a number"),
        ([], "-n : give a number of ranks"),
        (["two", "train.py"], "-n two"),
        (["2", "--nproc-per-node", "1", "train.py"], "-n 2 and --nproc-per-node 1"),
        (["2", "--nnodes", "2", "train.py"], "for one machine"),
        (["2", "--rdzv-endpoint", "host0:29400", "train.py"], "for one machine"),
    ],
)
def test_what_is_no_number_or_for_several_machines_is_refused(rest, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(run.UsageError, match=words):
        run._as_ranks("", rest)
