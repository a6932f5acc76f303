"""The streams that DataParallel uses on GPUs.

As in torch, each thread has current streams; here they are only numbers.  Calls of the
native side are noted, then run on default streams.
"""

import contextlib
import gc
from collections import namedtuple

import paceline
import pytest
import torch
from paceline._native import DeviceGroup
from replicas import Wrap, assert_same_grads, integer_weights, integers, loss_of
from support import fake_gpus
from support.threads import in_threads
from torch import nn

N = 3
Noted = namedtuple("Noted", "name streams device")


def current(machine):
    """Return the current stream of each device, and the current device."""
    return tuple(machine.current_stream(i) for i in range(N)), machine.current()


class Noting:
    """Wraps a native group, or a sum of gradients, whose streams are one member's."""

    def __init__(self, native, machine, noted):
        self._native, self._machine, self._noted = native, machine, noted

    def streams(self):
        return current(self._machine)[0]

    def gradient_sum(self, *arguments):
        made = self._native.gradient_sum(*arguments)
        return Noting(made, self._machine, self._noted)

    def __getattr__(self, name):
        def call(given, *arguments):
            now, device = current(self._machine)
            is_one = isinstance(given, int)
            assert given == (
                now[arguments[0] if name == "pack" else 0] if is_one else now
            )
            is_compared = name == "broadcast" and arguments[-1] is not None
            self._noted.append(Noted("refresh" if is_compared else name, now, device))
            return getattr(self._native, name)(0 if is_one else (0,) * N, *arguments)

        found = getattr(self._native, name)
        is_noted = isinstance(self._native, DeviceGroup) or name in ("pack", "end")
        return call if is_noted else found


@pytest.fixture
def machine():
    with fake_gpus.several(N) as machine:
        yield machine
        gc.collect()


class Net(nn.Module):
    """Parameters inside and outside segments, and a buffer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.register_buffer("scale", torch.ones(2))
        integer_weights(self)
        self.seen = []

    def forward(self, x, i):
        # all replicas share the list `seen`
        self.seen.append(self.where())
        return self.layers(x + self.table(i)) * self.scale


@pytest.fixture
def net(machine):
    """Return a wrapper, the calls of its native side, and the plain module."""
    plain, ours = Net(), Wrap(is_gpu=True)(Net(), N)
    Net.where = lambda self: current(machine)
    noted = []
    group = ours._engine_for(ours.device_ids).group
    group.native = Noting(group.native, machine, noted)
    return ours, noted, plain


def inputs():
    return integers(7, 3).requires_grad_(), torch.arange(7) % 5


@contextlib.contextmanager
def chosen(machine):
    """Make streams current that differ from a new thread's."""
    with contextlib.ExitStack() as stack:
        for index in (2, 1, 0):
            stack.enter_context(machine.on(index, 700 + index))
        yield tuple(700 + index for index in range(N))


def check(noted, streams, *names):
    """Check the noted calls and their streams; return the current devices."""
    assert {note.name for note in noted} == set(names)
    assert {note.streams for note in noted} == {streams}
    return {note.device for note in noted}


@pytest.mark.parametrize("is_first", [True, False], ids=["in order", "side by side"])
def test_a_forward_is_on_the_streams_of_its_caller(machine, net, is_first):
    ours, noted, _ = net
    if not is_first:
        ours(*inputs())
        noted.clear()
        ours.module.seen.clear()
    with chosen(machine) as expected:
        ours(*inputs())
    names = "copy", "broadcast" if is_first else "refresh"
    assert check(noted, expected, *names) == {0}
    assert sorted(device for _, device in ours.module.seen) == [0, 1, 2]
    for streams, device in ours.module.seen:
        assert streams[device] == expected[device]


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_backward_is_on_the_streams_of_its_forward(
    machine, net, create_graph, monkeypatch
):
    ours, noted, plain = net
    with chosen(machine) as expected:
        loss = loss_of(ours(*inputs()))
    noted.clear()
    moved, to = [], torch.Tensor.to

    def move(tensor, *arguments, **options):
        moved.append(current(machine))
        return to(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", move)
    in_threads(lambda _: loss.backward(create_graph=create_graph), 1)
    monkeypatch.undo()
    assert {streams for streams, _ in moved} == {expected}  # sparse, by torch
    names = () if create_graph else ("fence", "pack", "end", "settle")
    check(noted, expected, "copy", *names)
    loss_of(plain(*inputs())).backward()
    if not create_graph:
        assert_same_grads(ours.module.layers, plain.layers)


def test_outputs_are_joined_on_the_streams_of_the_caller(machine, net):
    ours, noted, _ = net
    chunks, kwargs = ours.scatter(inputs(), {}, ours.device_ids)
    with chosen(machine) as expected:
        replicas = ours.replicate(ours.module, ours.device_ids)
        outputs = ours.parallel_apply(replicas, chunks, kwargs)
        noted.clear()
        ours.gather(outputs, ours.output_device)
    assert check(noted, expected, "copy") == {0}


def test_streams_are_asked_of_torch(machine):
    group = paceline.DataParallel(nn.Linear(3, 2))._engine_for([0, 1, 2]).group
    with chosen(machine) as expected:
        assert group.streams()[1:] == (expected, list(expected))
