"""Which streams what DataParallel does on GPUs is put into.

The machine here has streams that are current by thread, as torch has them, and they are
numbers alone: what the native side is asked for is noted, then done on default streams.
"""

import contextlib
import gc
import threading
from collections import namedtuple

import paceline
import pytest
import torch
from paceline._compat import torch_core, torch_cuda
from replicas import assert_same_grads, integer_weights, integers, loss_of
from support import fake_gpus
from support.threads import in_threads
from torch import nn

N = 3
Noted = namedtuple("Noted", "name streams device")


class Streams(threading.local):
    """The current device of a thread, and the current stream of each."""

    def __init__(self):
        self.device = 0
        self.by_device = [100 + index for index in range(N)]

    @contextlib.contextmanager
    def on(self, index, stream):
        before = self.device, self.by_device[index]
        self.device, self.by_device[index] = index, stream
        yield
        self.device, self.by_device[index] = before


class Native:
    """Stands before a group's native side."""

    def __init__(self, native, streams, noted):
        self._native, self._streams, self._noted = native, streams, noted

    def streams(self):
        return tuple(self._streams.by_device)

    def gradient_sum(self, *arguments):
        return Sum(self._native.gradient_sum(*arguments), self.note_one)

    def note_one(self, name, stream, member):
        """Note a call that is given the stream of one member."""
        now = self.streams()
        assert stream == now[member]
        self._noted.append(Noted(name, now, self._streams.device))

    def __getattr__(self, name):
        def call(given, *arguments):
            assert given == self.streams()
            self._noted.append(Noted(name, given, self._streams.device))
            return getattr(self._native, name)((0,) * N, *arguments)

        return call


class Sum:
    """Stands before what adds up the gradients of a segment."""

    def __init__(self, native, note):
        self._native, self._note = native, note

    def __getattr__(self, name):
        return getattr(self._native, name)

    def pack(self, stream, member, *arguments):
        self._note("pack", stream, member)
        return self._native.pack(0, member, *arguments)

    def end(self, stream):
        self._note("end", stream, 0)
        self._native.end(0)


@pytest.fixture
def streams(monkeypatch):
    with fake_gpus.several(N) as machine:
        current = Streams()
        monkeypatch.setattr(machine, "current_stream", lambda i: current.by_device[i])
        monkeypatch.setattr(machine, "current", lambda: current.device)
        monkeypatch.setattr(machine, "on", current.on)
        yield current
        gc.collect()


class Net(nn.Module):
    """Parameters in segments and by themselves, and a buffer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.register_buffer("scale", torch.ones(2))
        integer_weights(self)
        self.seen = []

    def forward(self, x, i):
        # `seen` is one list of all replicas
        self.seen.append(self.where())
        return self.layers(x + self.table(i)) * self.scale


@pytest.fixture
def net(streams):
    """Return a wrapper, what its native side is asked for, and the plain module."""
    plain, module = Net(), Net()
    Net.where = lambda self: (streams.device, tuple(streams.by_device))
    ours = paceline.DataParallel(module)
    noted = []
    group = ours._engine_for(ours.device_ids).group
    group.native = Native(group.native, streams, noted)
    return ours, noted, plain


def inputs():
    return integers(7, 3).requires_grad_(), torch.arange(7) % 5


@contextlib.contextmanager
def chosen(streams):
    """Have other streams be current than those that a thread begins with."""
    with contextlib.ExitStack() as stack:
        for index in (2, 1, 0):
            stack.enter_context(streams.on(index, 700 + index))
        yield tuple(700 + index for index in range(N))


def check(noted, streams, *names):
    """Check what was asked for, and on which streams, of a caller with device 0."""
    assert {note.name for note in noted} == set(names)
    for note in noted:
        assert (note.streams, note.device) == (streams, 0), note


@pytest.mark.parametrize("is_first", [True, False], ids=["in order", "side by side"])
def test_a_forward_is_on_the_streams_of_its_caller(streams, net, is_first):
    ours, noted, _ = net
    if not is_first:
        ours(*inputs())
        noted.clear()
        ours.module.seen.clear()
    with chosen(streams) as expected:
        ours(*inputs())
    check(noted, expected, "copy", "broadcast" if is_first else "refresh")
    assert sorted(index for index, _ in ours.module.seen) == [0, 1, 2]
    for index, by_device in ours.module.seen:
        assert by_device[index] == expected[index]


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_backward_is_on_the_streams_of_its_forward(
    streams, net, create_graph, monkeypatch
):
    ours, noted, plain = net
    with chosen(streams) as expected:
        loss = loss_of(ours(*inputs()))
    noted.clear()
    moved, to = [], torch.Tensor.to

    def move(tensor, *arguments, **options):
        moved.append((tuple(streams.by_device), streams.device))
        return to(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", move)
    in_threads(lambda _: loss.backward(create_graph=create_graph), 1)
    monkeypatch.undo()
    assert set(moved) == {(expected, 0)}, "sparse gradients travel by torch"
    names = () if create_graph else ("fence", "pack", "end", "settle")
    check(noted, expected, "copy", *names)
    loss_of(plain(*inputs())).backward()
    if not create_graph:
        assert_same_grads(ours.module.layers, plain.layers)


def test_outputs_are_joined_on_the_streams_of_the_caller(streams, net):
    ours, noted, _ = net
    chunks, kwargs = ours.scatter(inputs(), {}, ours.device_ids)
    with chosen(streams) as expected:
        replicas = ours.replicate(ours.module, ours.device_ids)
        outputs = ours.parallel_apply(replicas, chunks, kwargs)
        noted.clear()
        ours.gather(outputs, ours.output_device)
    check(noted, expected, "copy")


def test_streams_are_asked_of_torch(streams):
    torch_cuda.current_stream = lambda index: streams.by_device[index]
    torch_core.attach()
    group = paceline.DataParallel(nn.Linear(3, 2))._engine_for([0, 1, 2]).group
    with chosen(streams) as expected:
        assert group.streams() == (expected, list(expected))
