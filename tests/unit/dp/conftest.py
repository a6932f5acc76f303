"""What the tests of DataParallel in one process share."""

import types

import pytest
from model_states import Follower, Model, share
from paceline import DataParallel
from paceline._dp import effects
from thread_cases import Call, Nothing


@pytest.fixture
def wrap():
    """Make wrappers that are closed, and whose replicas run side by side at once."""
    wrappers = []

    def make(module, n_replicas=2, *, is_new=False):
        if isinstance(module, types.FunctionType):
            module = Call(module)
        wrapper = DataParallel(module, ["cpu"] * n_replicas, engine="thread")
        wrappers.append(wrapper)
        if not is_new:
            effects._records[module] = Nothing()
        return wrapper

    yield make
    for wrapper in wrappers:
        wrapper.close()


@pytest.fixture
def shared():
    return share(Model())


@pytest.fixture
def follower(shared):
    return Follower(shared)
