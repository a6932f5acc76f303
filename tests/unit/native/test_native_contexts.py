"""Steps of the native reducer whose gradients are not the parameters' own."""

import weakref

import pytest
import torch
from natives import MIB, make_reducer, make_world
from torch import nn


class Home:
    """Has a gradient in a parameter's place."""

    def __init__(self, values):
        self.grad = None if values is None else torch.tensor(values)


def doubled(*homes):
    """Return a reducer that doubles gradients, of parameters of 3 elements."""
    params = [nn.Parameter(torch.ones(3)) for _ in homes]
    reducer = make_reducer(make_world(arena_bytes=MIB), params)

    class Carrier:
        def __init__(self):
            self.mine = weakref.ref(reducer)
            self.buckets = {}

        def post(self, index):
            n = 3 * len(self.mine().buckets[index])
            self.buckets[index] = torch.empty(n)
            self.mine().read_bucket(index, self.buckets[index])

        def finish(self):
            for index, buffer in self.buckets.items():
                self.mine().write_bucket(index, buffer * 2)

        def refuse(self):
            """Nothing was refused."""

        def abandon(self):
            """Nothing is on its way."""

    reducer.set_comm_hook(Carrier(), MIB, MIB)
    reducer.contexts = lambda task: homes
    return reducer, params


def backward(*calls):
    """Go backward through one tensor, and call each in it."""
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    for call in calls:
        y.register_hook(lambda _, call=call: call())
    y.backward()


def test_means_are_written_where_the_gradients_are():
    homes = [Home([1.0, 2.0, 3.0]), Home(None)]
    grad = homes[0].grad
    reducer, params = doubled(*homes)
    params[1].grad = torch.ones(3)
    backward(lambda: reducer.arrive_in_context(0, 5))
    assert homes[0].grad is grad
    assert grad.tolist() == [2.0, 4.0, 6.0]
    assert homes[1].grad is None
    assert [p.grad is None for p in params] == [True, False]
    assert params[1].grad.tolist() == [1.0] * 3
    assert reducer.ready_counts == b"\1\0"


def test_two_backwards_at_once_are_refused():
    reducer, (p,) = doubled(Home([1.0] * 3))
    with pytest.raises(RuntimeError, match="one after the other"):
        backward(
            lambda: reducer.arrive_in_context(0, 5),
            lambda: reducer.arrive_in_context(0, 6),
        )
    assert not reducer.is_active
    with pytest.raises(RuntimeError, match="one after the other"):
        backward(lambda: reducer.arrive_in_context(0, 5), p.sum().backward)


def test_arguments_are_checked():
    reducer, _ = doubled(Home([1.0] * 3))
    for arguments in ((1, 5), (-1, 5), (0, -1)):
        with pytest.raises(ValueError, match="no parameter"):
            reducer.arrive_in_context(*arguments)
    with pytest.raises(TypeError):
        reducer.arrive_in_context(0)
    del reducer.contexts
    assert reducer.contexts is None
    with pytest.raises(ValueError, match="no parameter"):
        reducer.arrive_in_context(0, 5)


@pytest.mark.parametrize(
    ("contexts", "error"),
    [
        (lambda task: [], ValueError),
        (lambda task: 5, TypeError),
        (lambda task: {}["mine"], KeyError),
        (5, TypeError),
    ],
)
def test_what_cannot_be_read_fails_the_step(contexts, error):
    reducer, (p,) = doubled(Home([1.0] * 3))
    reducer.contexts = contexts
    with pytest.raises(error):
        backward(lambda: reducer.arrive_in_context(0, 5))
    assert not reducer.is_active
    p.sum().backward()
    assert p.grad.tolist() == [2.0] * 3


def test_a_reducer_without_its_hooks_takes_nothing():
    home = Home([1.0] * 3)
    reducer, _ = doubled(home)
    reducer.detach()
    backward(lambda: reducer.arrive_in_context(0, 5))
    assert home.grad.tolist() == [1.0] * 3
