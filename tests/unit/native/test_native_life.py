"""The native module's objects leave nothing behind."""

import gc
import os
import weakref

import pytest
import torch
from natives import MIB, follow, make_reducer, make_world, watched_net
from paceline import DistributedDataParallel, _native
from paceline._ddp.model_spec import Watch
from support.leaks import assert_leaves_nothing
from torch import nn


def n_of(what):
    return len(os.listdir(f"/proc/self/{what}"))


def make_no_world():
    with pytest.raises(ValueError, match="pids"):
        make_world(pids=[])


@pytest.mark.parametrize("make", [_native.Listener, make_world, make_no_world])
def test_a_thousand_listeners_and_worlds_leave_nothing(make):
    assert_leaves_nothing(make)


@pytest.mark.parametrize("is_made", [True, False])
def test_a_thousand_reducers_leave_nothing_whether_they_are_made_or_not(is_made):
    world = make_world(arena_bytes=MIB)
    name = "kept-under-this-name"
    owner = {"kept": torch.zeros(2), name: torch.zeros(3)}
    small, large = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(400))
    params = [small, large] if is_made else [small, large, torch.ones(3)]

    def make():
        if is_made:
            make_reducer(world, params, [(owner, name, False)])
            return
        with pytest.raises(RuntimeError, match="doesn't require grad"):
            make_reducer(world, params, [(owner, name, False)])

    assert_leaves_nothing(make, world, owner, name, *params, n=1000 if is_made else 200)
    assert not small._post_accumulate_grad_hooks
    assert not large._post_accumulate_grad_hooks


def two_parameters():
    """Return a reducer and its parameters; the second one's gradient is a view."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(400))]
    return make_reducer(make_world(arena_bytes=MIB), params), params


def step(reducer, params):
    reducer.forward_begins()
    sum((p * p).sum() for p in params).backward()


def is_gone(*refs):
    gc.collect()
    return [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
def test_a_thousand_backwards_leave_nothing(keep):
    reducer, params = two_parameters()

    def once():
        kept = [p.grad for p in params] if keep else []
        for p in params:
            p.grad = None
        step(reducer, params)
        assert reducer.is_active is False
        assert all(bool((p.grad == 2).all()) for p in params)
        del kept

    assert_leaves_nothing(once, *params)
    assert reducer.step >= 1000


def test_a_hundred_failed_backwards_leave_nothing():
    reducer, params = two_parameters()
    step(reducer, params)

    def explode(_):
        raise KeyError("mine")

    def once():
        nonlocal reducer
        reducer.forward_begins()
        early = params[0] * 1
        early.register_hook(explode)
        with pytest.raises(KeyError, match="mine"):
            (early.sum() + (params[1] * params[1]).sum()).backward()
        with pytest.raises(_native.PeerError, match="no forward has met"):
            step(reducer, params)
        for p in params:
            p.grad = None
        reducer = follow(reducer, make_reducer(params=params))

    assert_leaves_nothing(once, n=100)
    step(reducer, params)
    assert reducer.n_taken == 2 < 100 < reducer.step
    assert params[1].grad.unique().tolist() == [2.0]


def test_a_wrapper_and_its_reducer_in_a_cycle_are_collected():
    world = make_world(arena_bytes=MIB)
    net = nn.Linear(20, 20)
    net.register_buffer("kept", torch.zeros(1))
    reducer = make_reducer(
        world, list(net.parameters()), [(net._buffers, "kept", False)]
    )
    net.holder = {"reducer": reducer}
    net._buffers["kept"].reducer = reducer  # a cycle through the reducer
    step(reducer, list(net.parameters()))
    gone = [weakref.ref(thing) for thing in (world, net, reducer)]
    del world, net, reducer
    assert is_gone(*gone)


def test_a_cycle_through_a_parameter_is_collected():
    world = make_world(arena_bytes=MIB)
    param = nn.Parameter(torch.ones(3))
    param.reducer = make_reducer(world, [param])
    gone = [weakref.ref(thing) for thing in (param, param.reducer, world)]
    del world, param
    assert is_gone(*gone)


def test_a_reducer_that_is_dropped_in_its_own_backward_does_no_harm():
    reducer, params = two_parameters()
    held = [reducer]
    del reducer
    held[0].forward_begins()
    x = (params[0] * 2).sum()
    x.register_hook(lambda _: held.clear())
    (x + params[1].sum()).backward()
    gc.collect()
    assert params[0].grad.unique().tolist() == [2.0]


def test_the_wrapper_of_one_rank_has_no_world_and_no_hook(alone):
    before = n_of("fd"), n_of("task")
    wrapper = DistributedDataParallel(nn.Linear(2, 2))
    assert (n_of("fd"), n_of("task")) == before
    assert wrapper.module.weight._post_accumulate_grad_hooks is None


def test_a_thousand_watches_leave_nothing():
    net = watched_net()
    things = [net, net[0].weight, net[0]._parameters, net._modules, Watch]

    def once():
        assert Watch(net).changed() is False
        with pytest.raises(TypeError):
            _native.converted([(net[0].weight, 3)])

    assert_leaves_nothing(once, *things)


def test_a_watch_in_a_cycle_with_its_model_is_collected():
    net = watched_net()
    net.seen = {"watch": Watch(net)}
    gone = weakref.ref(net)
    del net
    assert is_gone(gone)
