"""Fixtures of tests in one process."""

from datetime import timedelta

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def start_by_fork(forked_workers):
    """Fork the worker processes of every file."""


@pytest.fixture
def alone(tmp_path):
    """Make a default process group of only this process."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(tmp_path / "store"), 1),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()
