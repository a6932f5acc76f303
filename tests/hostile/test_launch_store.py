"""Neighbours of a job of `paceline.launch()`: what they reach, and what they read.

All its ranks are on one host, so none of its processes listens beyond the loopback.
"""

import os
import re
import socket
from pathlib import Path

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._launch import processes
from support.ports import listening
from torch import nn

pytestmark = pytest.mark.usefixtures("forked_workers")


def sum_of_ranks(group=None):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=group)
    return float(total)


def again_from_the_environment():
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    return sum_of_ranks()


def in_a_new_group():
    return sum_of_ranks(dist.new_group([0, 1]))


def in_a_step():
    model = paceline.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    (model(torch.ones(1, 1)) * 2 * dist.get_rank()).sum().backward()
    return float(next(model.parameters()).grad)


@pytest.mark.parametrize(
    "meet", [sum_of_ranks, in_a_new_group, again_from_the_environment, in_a_step]
)
def test_ranks_and_their_caller_listen_on_the_loopback_alone(meet):
    def look():
        total = meet()
        found = listening(os.getpid()), listening(os.getppid())
        dist.barrier()
        return total, found

    for total, found in paceline.launch(look, 2):
        assert total == 1.0
        own, callers = map(set, found)
        assert own <= {"127.0.0.1", "::1"}
        assert callers == {"127.0.0.1"}


def connect(host):
    port = int(os.environ["MASTER_PORT"])
    socket.create_connection((host, port), timeout=20).close()


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_a_stranger_at_another_address_is_refused(host):
    with pytest.raises(paceline.RankError) as caught:
        paceline.launch(connect, 1, host)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert not isinstance(cause, TimeoutError)


def test_gloo_listens_where_the_user_says(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert processes._environment(1)["GLOO_SOCKET_IFNAME"] == "eth7"


def test_each_call_has_a_secret_that_only_its_ranks_read(monkeypatch, capfd):
    monkeypatch.setenv("PACELINE_SECRET", "of the caller")

    def look():
        lines = [
            (folder / "cmdline").read_bytes()
            for folder in Path("/proc").iterdir()
            if folder.name in (str(os.getpid()), str(os.getppid()))
        ]
        return os.environ["PACELINE_SECRET"], b" ".join(lines).decode()

    secrets = []
    for _ in range(2):
        found = paceline.launch(look, 2)
        (secret,) = {secret for secret, _ in found}
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert not any(secret in line for _, line in found)
        secrets.append(secret)
    assert secrets[0] != secrets[1]
    assert os.environ["PACELINE_SECRET"] == "of the caller"
    assert not any(secret in text for secret in secrets for text in capfd.readouterr())
