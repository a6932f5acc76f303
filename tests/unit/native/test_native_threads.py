"""Several threads in the extension at once, with and without a GIL."""

import gc
import os
import queue
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from natives import make_reducer
from paceline import _native
from support.programs import run_python
from support.threads import IS_FREE_THREADED, in_threads
from torch import nn
from values import chunk

N_THREADS = 4


def nested(k):
    """Return tensors in containers, with different values in each thread."""
    x = torch.arange(8.0).reshape(4, 2) + k
    return [x, {"a": (x + 1, None), "b": [k, x + 2]}], {"c": x + 3}


def same(left, right):
    return torch.equal(
        torch.cat([t.flatten() for t in _native.flatten(left)[1]]),
        torch.cat([t.flatten() for t in _native.flatten(right)[1]]),
    )


def test_threads_split_and_join_each_their_own_values():
    def work(k):
        for _ in range(200):
            value = nested(k)
            tree, leaves = _native.flatten(value)
            assert same(tree.unflatten(leaves), value)
            scattered = _native.scatter((value[0],), value[1], 2, 0)
            parts = [chunk(scattered, r) for r in range(2)]
            joined = _native.gather(parts, scattered[1], 0)
            assert same(joined, ((value[0],), value[1]))

    in_threads(work, N_THREADS)


def test_threads_read_one_tree_and_one_split():
    value = nested(0)
    tree, leaves = _native.flatten(value)
    scattered = _native.scatter((value[0],), value[1], 2, 0)
    expected = chunk(scattered, 1)

    def work(k):
        for _ in range(200):
            assert same(tree.unflatten(leaves), value)
            assert same(chunk(scattered, 1), expected)

    in_threads(work, N_THREADS)


def test_threads_read_a_dict_that_another_one_changes():
    kept = {f"{i}": torch.zeros(1) for i in range(8)}
    holder, at_first, is_over = SimpleNamespace(kept=kept), dict(kept), []

    def work(k):
        if k == 0:
            while len(is_over) < N_THREADS - 1:
                for i in range(16):
                    kept[f"{i}"] = torch.zeros(1)
                    kept.pop(f"{15 - i}", None)
            return
        for _ in range(1000):
            sizes, names, values = _native.items([holder], ("kept",))
            assert sum(sizes) == len(names) == len(values)
            assert all(type(value) is torch.Tensor for value in values)
            assert _native.differing([kept], [at_first], work) in ([], [0])
            with suppress(KeyError, RuntimeError):  # Python's: a key is gone
                assert len(_native.flatten(kept)[1]) <= 16
        is_over.append(k)

    in_threads(work, N_THREADS)


def make_net(k):
    net = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(8)])
    for i, p in enumerate(net.parameters()):
        nn.init.constant_(p, (i + k) % 2)
    return net


def grads_of(net, x):
    net.zero_grad()
    net(x).sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def all_equal(left, right):
    return all(map(torch.equal, left, right))


def test_reducers_are_made_and_end_while_others_reduce():
    over = queue.SimpleQueue()  # objects of one thread are destroyed in another

    def work(k):
        x = torch.ones(2, 3)
        for _ in range(12):
            net = make_net(k)
            expected = grads_of(net, x)
            reducer = make_reducer(params=net.parameters())
            for _ in range(3):
                assert all_equal(grads_of(net, x), expected)
            over.put((net, reducer))
            del net, reducer
            if k % 2:
                while not over.empty():
                    over.get()

    in_threads(work, N_THREADS)


def test_a_reducer_may_end_while_another_thread_is_in_its_backward():
    x = torch.ones(2, 3)
    for _ in range(20):
        nets = [make_net(k) for k in range(N_THREADS)]
        expected = [grads_of(net, x) for net in nets]
        reducers = {
            k: make_reducer(params=nets[k].parameters()) for k in range(1, N_THREADS)
        }

        def work(k, nets=nets, expected=expected, reducers=reducers):
            if k == 0:
                while reducers:
                    reducers.popitem()
                return
            for _ in range(4):
                assert all_equal(grads_of(nets[k], x), expected[k])

        in_threads(work, N_THREADS)


def test_the_collector_runs_while_threads_are_in_the_extension():
    def work(k):
        for _ in range(15):
            if k == 0:
                gc.collect()
                continue
            net = make_net(k)
            net.kept = make_reducer(params=net.parameters())  # a cycle
            assert len(grads_of(net, torch.ones(2, 3))) == 8
            del net

    in_threads(work, N_THREADS)


@pytest.mark.skipif(not IS_FREE_THREADED, reason="this Python has a GIL")
@pytest.mark.parametrize("given", [None, "0", "1"])
def test_importing_leaves_the_gil_off_from_3_14_on(given):
    code = "import paceline, sys; paceline.DataParallel; print(sys._is_gil_enabled())"
    env = {k: v for k, v in os.environ.items() if k != "PYTHON_GIL"}
    env |= {} if given is None else {"PYTHON_GIL": given}
    is_enabled = given == "1" or (given is None and sys.version_info < (3, 14))
    ran = run_python(code, flags=["-W", "ignore::RuntimeWarning"], env=env)
    assert ran.stdout.split() == [str(is_enabled)]
