"""Every test that asks for `wrap` runs with replicas on the CPU and on GPUs."""

import pytest
import torch
from replicas import Wrap
from support import devices, fake_gpus

devices.load()  # before the first backward of this process: it starts their threads


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Run torch's operations by one thread: a busy machine makes teams of them slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", "gpu"])
def wrap(request):
    """Return a function that wraps a module for n replicas; the GPUs are simulated."""
    torch.manual_seed(0)
    if request.param == "cpu":
        yield Wrap()
        return
    with fake_gpus.several(4):
        yield Wrap(is_gpu=True)


@pytest.fixture
def wrap_on_cpu():
    """Return the same for the CPU alone."""
    torch.manual_seed(0)
    return Wrap()


@pytest.fixture(params=[(2, ()), (3, ("peers=0",))], ids=["2", "3"])
def n_gpus(request):
    """Return how many GPUs there are, which reach one another or do not."""
    n_gpus, options = request.param
    with fake_gpus.several(n_gpus, *options):
        yield n_gpus
