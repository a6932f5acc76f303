"""Both engines of DataParallel: every test that asks for `wrap` runs with each."""

import gc

import pytest
import torch
from kept_workers import keep_workers
from replicas import Wrap
from support import fake_gpus


@pytest.fixture(scope="module")
def idle_workers(forked_workers):
    """Let a closed wrapper's processes serve the next wrapper of the file."""
    with keep_workers():
        yield


def _wrapping(engine):
    torch.manual_seed(0)
    if engine != "gpu":
        wrap = Wrap(engine)
        yield wrap
        wrap.close()
        return
    with fake_gpus.several(4):
        wrap = Wrap("thread", is_gpu=True)
        yield wrap
        wrap.close()
        gc.collect()


@pytest.fixture(params=["thread", "process", "gpu"])
def wrap(request, idle_workers):
    """Return a function that wraps a module for n replicas, by the engine's name."""
    yield from _wrapping(request.param)


@pytest.fixture(params=["thread", "auto"])
def wrap_by_default(request, idle_workers):
    """Return the same, with processes where they can serve."""
    yield from _wrapping(request.param)


@pytest.fixture(params=[(2, ()), (3, ("peers=0",))], ids=["2", "3"])
def n_gpus(request):
    """Return how many GPUs there are, which reach one another or do not."""
    n_gpus, options = request.param
    with fake_gpus.several(n_gpus, *options):
        yield n_gpus
        gc.collect()
