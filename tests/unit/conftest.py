"""What the tests of one process share."""

from datetime import timedelta

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def start_by_fork(forked_workers):
    """Have every file's worker processes forked."""


@pytest.fixture
def alone(tmp_path):
    """A default process group of this process alone."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(tmp_path / "store"), 1),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()
