"""Saving, loading and copying: the wrapper, its module, their state."""

import copy
import io
import pickle

import paceline
import pytest
import torch
from replicas import (
    Twin,
    assert_same,
    assert_same_grads,
    assert_same_state,
    integers,
    loss_of,
    net,
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


def step(model, x):
    loss = loss_of(model(x))
    loss.backward()
    return loss.detach()


# ---- state dicts --------------------------------------------------------------------


def test_keys_of_the_state_are_those_of_torch(wrap):
    module = Mixed()
    ours = wrap(module)
    assert list(ours.state_dict()) == [f"module.{key}" for key in module.state_dict()]
    assert list(dict(ours.named_parameters())) == [
        f"module.{name}" for name, _ in module.named_parameters()
    ]
    assert isinstance(ours, nn.DataParallel)
    assert ours.module is module


@pytest.mark.parametrize("prefix", ["", "module."], ids=["bare", "prefixed"])
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_state_loads_after_wrapping(wrap, prefix, assign):
    twin = Twin(wrap, Mixed())
    x = integers(7, 3)
    twin.step(step_loss, x)  # the replicas have seen the old state
    other = Mixed(seed=40)
    state = {f"{prefix}{k}": v.clone() for k, v in other.state_dict().items()}
    result = twin.ours.load_state_dict(state, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    twin.plain.load_state_dict(other.state_dict())
    twin.zero()
    twin.step(step_loss, x)
    assert_same_state(twin.ours, other)


def step_loss(model, x):
    return loss_of(model(x))


def test_a_state_with_wrong_keys_is_an_error(wrap):
    ours = wrap(Mixed())
    ours(integers(7, 3))
    state = ours.state_dict()
    state.pop("module.shift")
    with pytest.raises(RuntimeError, match=r"Missing key.*shift"):
        ours.load_state_dict(state)
    assert ours(integers(7, 3)).shape == (7, 2)


def test_a_saved_state_holds_the_model_and_no_more(wrap):
    module = nn.Linear(100, 10)
    ours = wrap(module)
    for _ in range(2):
        ours(torch.ones(7, 100)).sum().backward()
    sizes = []
    for model in (ours.module, nn.Linear(100, 10)):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        sizes.append(len(file.getvalue()))
    assert sizes[0] == sizes[1]
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    fresh = wrap(nn.Linear(100, 10))
    fresh.load_state_dict(loaded)
    assert_same_state(fresh, ours)
    assert torch.equal(fresh(torch.ones(7, 100)), ours(torch.ones(7, 100)))


def test_a_state_of_the_optimizer_loads(wrap):
    ours, x = wrap(Mixed()), integers(7, 3)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5, momentum=0.5)
    step(ours, x)
    optimizer.step()
    fresh = wrap(Mixed(seed=40))
    other = torch.optim.SGD(fresh.parameters(), lr=0.5, momentum=0.5)
    fresh.load_state_dict(ours.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, chosen in ((ours, optimizer), (fresh, other)):
        model.zero_grad()
        step(model, x)
        chosen.step()
    assert_same_state(fresh, ours)


# ---- copies -------------------------------------------------------------------------


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda wrapper: pickle.loads(pickle.dumps(wrapper)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("has_run", [False, True], ids=["fresh", "used"])
def test_copies_are_whole_and_their_own(wrap, make, has_run):
    plain, module = Mixed(), Mixed()
    ours = wrap(module, 3)
    x = integers(7, 3)
    if has_run:
        step(ours, x)
        step(plain, x)
    other = make(ours)
    assert type(other) is paceline.DataParallel
    assert other.device_ids == ours.device_ids
    assert other.dim == ours.dim
    assert_same_state(other, plain)
    other.zero_grad()
    ours.zero_grad()
    plain.zero_grad()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    assert_same_state(ours, plain)  # the copy is not the original
    assert_same(step(ours, x), step(plain, x))
    assert_same_grads(ours, plain)
    assert all(p.grad is None for p in other.parameters())
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(1)
    plain.zero_grad()
    assert_same(step(other, x), step(plain, x))
    assert_same_grads(other, plain)


def test_the_module_can_be_copied_out_of_its_wrapper(wrap):
    ours, x = wrap(Mixed()), integers(7, 3)
    step(ours, x)
    for make in COPIES.values():
        bare = make(ours.module)
        assert type(bare) is Mixed
        assert_same_state(bare, ours.module)
        assert torch.equal(bare(x), ours(x))
        with torch.no_grad():
            next(bare.parameters()).add_(1)
        assert not torch.equal(bare(x), ours(x))


def test_a_module_may_be_wrapped_again(wrap):
    twin = Twin(wrap, Mixed())
    x = integers(7, 3)
    for n in (2, 3):
        twin.zero()
        twin.step(step_loss, x)
        twin.ours = wrap(twin.inner, n)
    twin.zero()
    twin.step(step_loss, x)
