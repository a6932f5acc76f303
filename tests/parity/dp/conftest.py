"""Fixtures that wrap modules for replicas: on the CPU, or on GPUs if a test asks."""

import gc

import pytest
import torch
from replicas import Wrap
from support import devices, fake_gpus

devices.load()  # before the first backward of this process: it starts their threads


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Run torch's operations on one thread: teams are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def wrap(request):
    """Return a function that wraps a module for n replicas; see `replicas.ON_EACH`."""
    if getattr(request, "param", "cpu") == "gpu":
        return request.getfixturevalue("wrap_on_gpus")
    torch.manual_seed(0)
    return Wrap()


@pytest.fixture
def wrap_on_gpus():
    """Return the same for four simulated GPUs."""
    with fake_gpus.several(4):
        torch.manual_seed(0)
        yield Wrap(is_gpu=True)
        gc.collect()
