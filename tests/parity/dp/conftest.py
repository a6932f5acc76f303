"""Both engines of DataParallel: every test that asks for `wrap` runs with each."""

import pytest
import torch
from kept_workers import keep_workers
from replicas import Wrap


@pytest.fixture(scope="module")
def idle_workers(forked_workers):
    """Let a closed wrapper's processes serve the next wrapper of the file."""
    with keep_workers():
        yield


def _wrapping(engine):
    torch.manual_seed(0)
    wrap = Wrap(engine)
    yield wrap
    wrap.close()


@pytest.fixture(params=["thread", "process"])
def wrap(request, idle_workers):
    """Return a function that wraps a module for n replicas, by the engine's name."""
    yield from _wrapping(request.param)


@pytest.fixture(params=["thread", "auto"])
def wrap_by_default(request, idle_workers):
    """Return the same, with processes where they can serve."""
    yield from _wrapping(request.param)
