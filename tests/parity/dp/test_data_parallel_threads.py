"""How many intra-op threads operators have while replicas are worker processes."""

import gc

import pytest
import torch
from replicas import Wrap, integer_weights, integers, loss_of
from torch import nn

MANY = 257  # more than the share of any replica


@pytest.fixture(autouse=True)
def _many_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(MANY)
    yield
    torch.set_num_threads(before)


class Counting(nn.Module):
    """Notes how many threads there are in forward and in backward of replica 0."""

    def __init__(self):
        super().__init__()
        self.layer = integer_weights(nn.Linear(3, 2))
        self.seen = []
        self.error = None

    def note(self, *_):
        self.seen.append(torch.get_num_threads())
        if self.error is not None:
            raise self.error

    def forward(self, x, fails=False):
        self.seen.append(torch.get_num_threads())
        if fails:
            raise LookupError("on purpose")
        out = self.layer(x)
        if out.requires_grad:
            out.register_hook(self.note)
        return out


@pytest.fixture
def wrap(idle_workers):
    """Return a function that wraps a module by processes: threads share one count."""
    wrap = Wrap("process")
    yield wrap
    wrap.close()


def train(ours, n):
    """Take `n` steps' gradients."""
    for _ in range(n):
        loss_of(ours(integers(7, 3))).backward()


def test_replica_0_has_its_share_while_workers_live(wrap):
    model = Counting()
    ours = wrap(model)
    train(ours, 2)
    share = torch.get_num_threads()
    assert share < MANY
    assert model.seen == [share] * 4
    ours.close()
    assert torch.get_num_threads() == MANY


def test_threads_are_given_back_by_a_wrapper_that_is_dropped(idle_workers):
    ours = Wrap("process")(Counting())
    train(ours, 1)
    assert torch.get_num_threads() < MANY
    del ours
    gc.collect()
    assert torch.get_num_threads() == MANY


def test_threads_are_given_back_after_a_failure(wrap):
    model = Counting()
    ours = wrap(model)
    with pytest.raises(LookupError):
        ours(integers(7, 3), fails=True)
    model.error = LookupError("in backward")
    with pytest.raises(LookupError):
        train(ours, 1)
    ours.close()
    assert torch.get_num_threads() == MANY


@pytest.mark.parametrize("first", [0, 1])
def test_threads_are_given_back_by_the_last_of_two_wrappers(idle_workers, first):
    both = [Wrap("process")(Counting()) for _ in range(2)]
    for ours in both:
        train(ours, 1)
    both[first].close()
    both[1 - first].close()
    assert torch.get_num_threads() == MANY


def test_a_count_that_is_set_meanwhile_stays(wrap):
    model = Counting()
    ours = wrap(model)
    train(ours, 1)
    torch.set_num_threads(MANY + 1)
    train(ours, 1)
    assert model.seen[2:] == [MANY + 1] * 2
    ours.close()
    assert torch.get_num_threads() == MANY + 1
