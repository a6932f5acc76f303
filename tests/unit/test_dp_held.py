"""What is told of a module's attributes, and what is not, on the caller's side."""

import gc
import pickle
import weakref

import pytest
import torch
from natives import _torch  # hands torch to the native module
from paceline._shared import SharedModel
from torch import nn

assert _torch


class Node:
    """Holds itself."""

    def __init__(self):
        self.circle = [self]
        self.tensor = torch.zeros(4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.log = list(range(1000))
        self.options = {"rate": 0.5, "name": "some words", "deep": [{}]}
        self.array = torch.arange(3.0).numpy()


@pytest.fixture
def shared():
    return SharedModel(Model(), 1)


def n_bytes(news):
    return len(news["attributes"][0])


def test_nothing_is_told_where_nothing_has_changed(shared):
    assert shared.changes() == {}
    shared.forward_ends()
    assert shared.changes() == {}


def test_a_value_that_is_equal_is_no_news(shared):
    options = shared.module.options
    options.update(pickle.loads(pickle.dumps({"rate": 0.5, "name": "some words"})))
    shared.module.layer.training = bool(1)
    assert shared.changes() == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.log.append(1),
        lambda m: m.options.update(rate=0.25),
        lambda m: m.options["deep"].append({}),
        lambda m: m.options["deep"][0].update(a=1),
        lambda m: m.array.fill(7),
        lambda m: setattr(m, "new", {}),
        lambda m: delattr(m, "log"),
    ],
)
def test_what_has_changed_is_told_once_and_alone(shared, change):
    change(shared.module)
    news = shared.changes()
    assert list(news) == ["attributes"]
    assert n_bytes(news) < 1000  # and not all that the module holds
    assert shared.changes() == {}


def test_what_forward_has_changed_is_not_told(shared):
    module = shared.module
    for step in range(3):
        module.log.append(step)
        module.options["deep"] = [{"step": step}]
        module.kept = module.layer(torch.ones(1, 2))
        shared.forward_ends()
        news = shared.changes()
        assert news == {} or n_bytes(news) < 1000  # that a known list is gone, once
        assert (news == {}) or step == 0


def test_what_forward_makes_anew_each_time_is_not_kept(shared):
    gone = []
    for _ in range(300):
        shared.module.node = Node()
        gone.append(weakref.ref(shared.module.node))
        shared.forward_ends()
    gc.collect()
    assert sum(node() is not None for node in gone) < 100


def test_a_change_inside_what_forward_has_made_is_told_by_its_holder(shared):
    module = shared.module
    module.state = {"inner": [1]}
    shared.forward_ends()
    assert shared.changes() == {}
    module.state["inner"].append(2)
    assert list(shared.changes()) == ["attributes"]
    module.state["inner"].append(3)  # it is known now
    assert n_bytes(shared.changes()) < 200


def test_the_class_of_a_module_makes_it_another(shared):
    class Other(Model):
        pass

    shared.module.__class__ = Other
    assert shared.changes() is None
