"""Saving, loading and copying the wrapper, its module and their state."""

import copy
import io
import pickle

import paceline
import pytest
import torch
from programs import X
from replicas import (
    Twin,
    assert_same_grads,
    assert_same_state,
    grads_of,
    grow,
    integers,
    net,
    step,
)
from support.copies import saved_and_loaded
from torch import nn


class Mixed(nn.Module):
    """Parameters, a buffer, and an attribute that is neither."""

    def __init__(self, seed=0):
        super().__init__()
        self.layers = net(seed)
        self.register_buffer("shift", integers(2, seed=seed))
        self.factor = 2

    def forward(self, x):
        return self.layers(x) * self.factor + self.shift


def test_keys_of_the_state_are_those_of_torch(wrap):
    module = Mixed()
    ours = wrap(module)
    state, theirs = ours.state_dict(), nn.DataParallel(module).state_dict()
    assert list(state) == list(theirs)
    assert list(state._metadata) == list(theirs._metadata)
    assert list(dict(ours.named_parameters())) == [
        f"module.{name}" for name, _ in module.named_parameters()
    ]
    assert isinstance(ours, nn.DataParallel)
    assert ours.module is module


@pytest.mark.parametrize("prefix", ["", "module."], ids=["bare", "prefixed"])
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_state_loads_after_wrapping(wrap, prefix, assign):
    twin = Twin(wrap, Mixed())
    twin.step(step, X)  # the replicas have copied the old state
    other = Mixed(seed=40)
    state = {f"{prefix}{k}": v.clone() for k, v in other.state_dict().items()}
    result = twin.ours.load_state_dict(state, assign=assign)
    assert not any(result)
    twin.plain.load_state_dict(other.state_dict())
    twin.zero()
    twin.step(step, X)
    assert_same_state(twin.ours, other)


def saved_size(state):
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


def test_a_saved_state_holds_the_model_and_no_more(wrap):
    ours = wrap(nn.Linear(100, 10))
    for _ in range(2):
        ours(torch.ones(7, 100)).sum().backward()
    plain = saved_size(nn.Linear(100, 10).state_dict())
    assert saved_size(ours.module.state_dict()) == plain


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda wrapper: pickle.loads(pickle.dumps(wrapper)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("has_run", [False, True], ids=["fresh", "used"])
def test_copies_are_whole_and_their_own(wrap, make, has_run):
    plain, ours = Mixed(), wrap(Mixed(), 3)
    for model in (ours, plain) if has_run else ():
        step(model, X)
    other = make(ours)
    assert type(other) is paceline.DataParallel
    assert (other.device_ids, other.dim) == (ours.device_ids, ours.dim)
    for first, second in ((ours, other), (other, ours)):
        grow(second)  # the copy is independent
        for model in (first, plain):
            model.zero_grad()
            step(model, X).backward()
        assert_same_state(first, plain)
        assert_same_grads(first, plain)
        assert second is ours or grads_of(second) == [None] * 4
        grow(plain)
