"""Gradients are added up while backward runs, on device threads kept in step."""

import threading
import time

import paceline
import pytest
import torch
from paceline._compat import torch_graph
from paceline._dp import gradients, segments
from paceline._dp.gradients import Arrival, Gradients
from replicas import assert_same_grads, integers, linear, loss_of, moved, reals
from support import fake_gpus
from torch import nn

DEPTH, WIDTH, TAIL = 10, 16, 2


class InStep(torch.autograd.Function):
    """Notes the backward of a layer on each device, once all have reached it."""

    @staticmethod
    def forward(ctx, x, layer, meet):
        ctx.layer, ctx.meet = layer, meet
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.meet(ctx.layer, grad.device.index)
        return grad, None, None


class Net(nn.Module):
    """Layers whose weights have a segment each; one more segment has all biases."""

    def __init__(self, meet):
        super().__init__()
        self.meet = meet
        layers = [nn.Linear(WIDTH, WIDTH, bias=i < TAIL) for i in range(DEPTH)]
        self.layers = nn.ModuleList(layers).double()
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(integers(*p.shape, seed=number, low=-1, high=1))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = InStep.apply(torch.remainder(layer(x), 5), i, self.meet)
        return x


@pytest.mark.parametrize("n", [2, 4])
def test_sums_begin_as_soon_as_all_replicas_have_a_segment(n, monkeypatch):
    log, barriers = [], [threading.Barrier(n) for _ in range(DEPTH)]
    begin, collect = Gradients._begin, Gradients.collect

    def meet(layer, device):
        barriers[layer].wait(60)
        log.append(("layer", device, layer))

    def noted_begin(self, arrival):
        log.append(("begin", threading.get_ident()))
        begin(self, arrival)

    def noted_collect(self, part):
        log.append(("collect", part))
        return collect(self, part)

    monkeypatch.setattr(Gradients, "_begin", noted_begin)
    monkeypatch.setattr(Gradients, "collect", noted_collect)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", WIDTH * WIDTH * 8)
    monkeypatch.setattr(segments, "_FEW_BYTES", 0)
    x = integers(8, WIDTH)
    with fake_gpus.several(n):
        ours = paceline.DataParallel(Net(meet).to("gpu:0"), list(range(n)))
        loss_of(ours(x)).backward()
        del log[:]
        ours.zero_grad()
        loss_of(ours(x)).backward()
        plain = Net(lambda *_: None)
        loss_of(plain(x)).backward()
        assert_same_grads(ours, plain)
    last = max(i for i, it in enumerate(log) if it[:2] == ("layer", 0))
    begun = [i for i, it in enumerate(log) if it[0] == "begin"]
    collected = [it[1] for it in log[last:] if it[0] == "collect"]
    assert len(begun) == DEPTH + 1
    # All but those of the first layer, and of the biases, which are complete with it.
    assert sum(i < last for i in begun) >= DEPTH - 1
    # Member 0's stream waits for no sum before the end.
    assert len(collected) == DEPTH + 1
    assert len({it[1] for it in log if it[0] == "begin"}) <= n - 1  # never member 0


def grads_of_hooked(dtype):
    """Return gradients after three steps, and whether each was in its segment's sum."""
    barriers = [threading.Barrier(4) for _ in range(DEPTH)]
    begun, beside = [], Arrival.beside

    def noted(self, part, *, is_begun):
        begun.append(is_begun)
        return beside(self, part, is_begun=is_begun)

    with fake_gpus.several(4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arrival, "beside", noted)
        net = Net(lambda layer, _: barriers[layer].wait(60))
        with torch.no_grad():
            for number, p in enumerate(net.parameters()):
                p.copy_(reals(*p.shape, seed=number))
        ours, seen = paceline.DataParallel(net.to("gpu:0", dtype), [0, 1, 2, 3]), []
        for p in net.parameters():
            p.register_hook(lambda grad: seen.append(grad.shape))
        x = reals(9, WIDTH).to("gpu:0", dtype)
        for _ in range(2):  # the nodes of a thread's first forward have low numbers
            ours(x)
        for _ in range(3):
            ours(x).float().sum().backward()
        assert len(seen) == len(begun) == 3 * (DEPTH + TAIL)
        return [p.grad.cpu() for p in net.parameters()], begun


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sum_that_cannot_wait_for_its_segment_has_the_same_bits(dtype, monkeypatch):
    """Such as that of a parameter with hooks, if it comes early."""
    late, begun = grads_of_hooked(dtype)
    assert all(begun)
    set_turn = torch_graph.set_turn
    monkeypatch.setattr(torch_graph, "set_turn", lambda n, _: set_turn(n, 1 << 62))
    early, begun = grads_of_hooked(dtype)
    assert begun.count(False) > len(begun) // 2
    assert all(map(torch.equal, early, late))


class SlowSums:
    """A native group, or a sum; each second sum begins after the first is settled."""

    def __init__(self, native, log, is_settled):
        self._native, self.log, self.is_settled = native, log, is_settled

    def __getattr__(self, name):
        return getattr(self._native, name)

    def gradient_sum(self, *arguments):
        self.log.append("new")
        made = self._native.gradient_sum(*arguments)
        return SlowSums(made, self.log, self.is_settled)

    def begin(self, *arguments):
        assert self.log.count("begin") % 2 == 0 or self.is_settled.wait(60)
        self.log.append("begin")
        self._native.begin(*arguments)

    def settle(self, streams):
        self._native.settle(streams)
        self.log.append("settle")
        self.is_settled.set()


def test_streams_wait_for_each_sum_of_two_forwards_in_one_backward():
    """Also for those of one forward that begin when the other one's are collected."""
    x = integers(6, 3)
    with fake_gpus.several(2):
        plain = linear()
        ours = paceline.DataParallel(moved(linear(), "gpu:0"), [0, 1])
        ours(x.to("gpu:0"))
        group = ours._engine.group
        group.native = native = SlowSums(group.native, [], threading.Event())
        for _ in range(4):
            (loss_of(ours(x.to("gpu:0"))) + loss_of(ours(2 * x.to("gpu:0")))).backward()
            (loss_of(plain(x)) + loss_of(plain(2 * x))).backward()
            native.is_settled.clear()
        assert [it for it in native.log if it != "new"] == ["begin", "settle"] * 2 * 4
        assert native.log.count("new") <= 2
        assert_same_grads(ours, plain)
        del ours, group, native


class Late(Arrival):
    """Another thread begins the sum right after this one has asked whether it did."""

    @property
    def is_begun(self):
        found = self._begun.is_set()
        if not found and len(self.blocks) == self.n_rows:
            self._begun.wait(10)
        return found

    @is_begun.setter
    def is_begun(self, value):
        self.__dict__.setdefault("_begun", threading.Event())
        if value:
            self._begun.set()


def test_a_sum_may_begin_while_a_parameter_with_a_hook_is_collected(monkeypatch):
    monkeypatch.setattr(gradients, "Arrival", Late)
    begin, set_turn = Gradients._begin, torch_graph.set_turn
    monkeypatch.setattr(torch_graph, "set_turn", lambda n, _: set_turn(n, 1 << 62))

    def later(self, arrival):
        time.sleep(0.1)
        begin(self, arrival)

    monkeypatch.setattr(Gradients, "_begin", later)
    x = integers(7, 3)
    with fake_gpus.several(3):
        plain, net = linear(), moved(linear(), "gpu:0")
        ours = paceline.DataParallel(net, [0, 1, 2])
        theirs, mine = [], []
        for seen, model in (theirs, plain), (mine, net):
            for p in model.parameters():
                p.register_hook(lambda grad, seen=seen: seen.append(grad.cpu()))
        for _ in range(6):
            loss_of(plain(x)).backward()
            loss_of(ours(x.to("gpu:0"))).backward()
        del net, ours
    assert len(mine) == len(theirs) == 12
    mine, theirs = (sorted(grads, key=torch.Tensor.dim) for grads in (mine, theirs))
    assert all(map(torch.equal, mine, theirs))
