"""Both engines of DataParallel: every test that asks for `wrap` runs with each."""

import contextlib

import paceline
import pytest
import torch


class Wrap:
    """Wraps modules for one test, by one engine; closes all wrappers at its end."""

    def __init__(self, engine):
        self.engine = engine
        self._wrappers = []

    def __call__(self, module, n=2, **options):
        """Return the module behind a wrapper of n replicas."""
        return self.adopt(
            paceline.DataParallel(
                module, device_ids=["cpu"] * n, engine=self.engine, **options
            )
        )

    def adopt(self, wrapper):
        """Close a wrapper at the end that was made by other means, such as a copy."""
        self._wrappers.append(wrapper)
        return wrapper

    def forget(self, wrapper):
        """Hold on to a wrapper no longer."""
        self._wrappers.remove(wrapper)

    def close(self):
        engines = {wrapper.engine for wrapper in self._wrappers}
        for wrapper in self._wrappers:
            wrapper.close()
        assert engines <= {self.engine}, "another engine ran than was asked for"


@pytest.fixture(scope="module")
def idle_workers():
    """Let a closed wrapper's processes serve the next wrapper of the file."""
    try:
        from paceline._pool import keep_workers
    except ImportError:
        keep_workers = contextlib.nullcontext
    with keep_workers():
        yield


@pytest.fixture(params=["thread", "process"])
def wrap(request, idle_workers):
    """Return a function that wraps a module for n replicas, by the engine's name."""
    torch.manual_seed(0)
    wrap = Wrap(request.param)
    yield wrap
    wrap.close()
