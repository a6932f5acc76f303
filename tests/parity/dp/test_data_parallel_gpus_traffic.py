"""Traffic between GPUs: what is sent, when, and which streams wait.

The devices are simulated: see support/fake_gpus.py.
"""

import collections
import ctypes
import gc

import pytest
import torch
from paceline._dp import segments
from programs import buffer, module, parameter
from replicas import (
    Twin,
    Wrap,
    grow,
    integer_weights,
    integers,
    linear,
    loss_of,
    smooth_net,
)
from support import fake_gpus
from torch import nn


@pytest.fixture
def wrap(wrap_on_gpus):
    return wrap_on_gpus


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 256)


class Recorder:
    """Wraps a group's native side, and adds up the bytes that it moves."""

    def __init__(self, native):
        self._native = native
        self.bytes = collections.Counter()

    def __getattr__(self, name):
        return getattr(self._native, name)

    def broadcast(self, streams, ring, travelling, sums):
        for _, _, n_bytes, blocks in travelling if sums is None else ():
            self.bytes["there"] += n_bytes * sum(block is not None for block in blocks)
        self._native.broadcast(streams, ring, travelling, sums)

    def gradient_sum(self, *arguments):
        return RecordedSum(self._native.gradient_sum(*arguments), self.bytes)

    def copy(self, streams, source, tensors, target, places):
        if source != target:
            self.bytes["beside"] += sum(tensor.nbytes for tensor in tensors)
        self._native.copy(streams, source, tensors, target, places)


class RecordedSum:
    """Wraps a sum of gradients in the same way."""

    def __init__(self, native, n_bytes):
        self._native, self._bytes = native, n_bytes

    def __getattr__(self, name):
        return getattr(self._native, name)

    def pack(self, stream, member, grads, block):
        self._bytes["back"] += block.nbytes
        return self._native.pack(stream, member, grads, block)


def record(ours):
    """Record a wrapper's group from now on."""
    group = ours._engine_for(ours.device_ids).group
    group.native = Recorder(group.native)
    return group.native.bytes


def fake():
    made = ctypes.CDLL(fake_gpus.library())
    made.host_kernel_fetched.restype = ctypes.c_ulonglong
    made.fake_sent_bytes.restype = ctypes.c_int64
    return made


def counts(*names):
    return [fake().fake_count(name.encode()) for name in names]


def fetched_bytes():
    """Return the bytes that devices fetched as they differed from member 0's."""
    return fake().host_kernel_fetched()


def sent_bytes(n):
    """Return the bytes that each of n devices has sent to each."""
    return torch.tensor(
        [[fake().fake_sent_bytes(a, b) for b in range(n)] for a in range(n)]
    )


class Traffic:
    """Bytes of parameters and buffers that have travelled since the last call."""

    def __init__(self, ours):
        self._moved = record(ours)
        self._before = 0, fetched_bytes()

    def __call__(self):
        now = self._moved["there"], fetched_bytes()
        sent, fetched = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        return sent, fetched


def norm_net():
    layers = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
    return nn.Sequential(*layers).double()


def test_a_training_step_moves_each_byte_once(wrap, small_segments):
    ours = wrap(nn.Sequential(linear(32, 8), linear(8, 32)), 4)
    x = integers(8, 8).to(wrap.device())
    ours(x)
    grow(ours)
    moved = record(ours)
    ours(x).sum().backward()
    n_bytes = sum(p.nbytes for p in ours.parameters())  # multiples of 64
    rows = 3 * x.nbytes // 4
    assert moved["there"] == moved["back"] == 3 * n_bytes
    assert moved["beside"] == 3 * rows  # inputs; outputs, and their gradients


def test_a_model_of_many_segments_trains(wrap, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 256)
    monkeypatch.setattr(segments, "_FEW", 2)
    layers = linear(6, 6), linear(6, 6), linear(6, 6), linear(9, 6)
    twin = Twin(wrap, nn.Sequential(*layers), n=3)
    twin.step(lambda model, x: model(x).sum(), integers(7, 6))
    layout = twin.ours._engine_for(twin.ours.device_ids)._replicated._layout
    assert 256 < layout.segment_bytes < 2048
    assert layout.segment_bytes % 64 == 0
    assert any(s.n_bytes > 256 for s in layout.segments)


def test_a_log_line_says_what_each_device_holds(wrap, caplog):
    ours = wrap(nn.Linear(512, 1024).float(), 2)
    with caplog.at_level("INFO", logger="paceline"):
        ours(torch.ones(4, 512))
        ours(torch.ones(4, 512))
    (line,) = [r.getMessage() for r in caplog.records if "MiB" in r.getMessage()]
    assert "2.0 MiB of parameters and buffers on each" in line
    assert "up to 3.0 MiB on gpu:0 for" in line
    assert "and 0.0 MiB on each other" in line


def test_a_buffer_made_anew_has_no_other_tensor_sent_again(wrap):
    def counts_anew(m, x):
        m.n = m.n + 1
        m.twice = 2 * m.n
        return m.layer(x) * m.twice[0]

    held = {name: buffer(torch.zeros(2)) for name in ("n", "twice")}
    twin = Twin(wrap, module(counts_anew, layer=linear(64, 512), **held), 3)

    def compare():
        twin.compare(torch.no_grad()(lambda model, x: model(x)), integers(6, 512))

    compare()
    traffic, engine = Traffic(twin.ours), twin.ours._engine_for(twin.ours.device_ids)
    layout = engine._replicated._layout
    for _ in range(3):
        compare()
        assert sum(traffic()) <= 2 * 2 * 64
    assert engine._replicated._layout is layout
    for module_ in (twin.inner, twin.plain):
        module_.twice = module_.n  # two names of one tensor
    compare()
    for module_ in (twin.inner, twin.plain):
        module_.n = module_.n.new_zeros(3)
    compare()
    twin.assert_same()


def test_evaluation_after_evaluation_sends_no_parameter(wrap):
    ours = wrap(norm_net(), 3).eval()
    x = integers(6, 16).to(wrap.device())
    n_bytes = sum(t.nbytes for t in (*ours.parameters(), *ours.buffers()))
    with torch.no_grad():
        expected = ours(x)
        traffic = Traffic(ours)
        for _ in range(3):
            assert torch.equal(ours(x), expected)
            assert traffic() == (0, 0)
        for p in ours.parameters():
            p.mul_(2)
        expected = ours.module(x)
        assert torch.allclose(ours(x), expected)
        sent, fetched = traffic()
        assert n_bytes * 2 * 0.8 < sent + fetched < n_bytes * 2 * 1.3
        assert torch.allclose(ours(x), expected)
        assert traffic() == (0, 0)


def test_in_training_what_is_frozen_and_what_waits_for_its_step_is_not_sent(wrap):
    """Adapters of a large model, and gradients that several forwards add up."""
    ours = wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)), 3)
    ours.module[0].requires_grad_(False)
    adapter = sum(p.nbytes for p in ours.module[1].parameters())
    optimizer = torch.optim.SGD(ours.module[1].parameters(), 0.1)
    x = integers(6, 64).float()
    ours(x).sum().backward()
    optimizer.step()
    traffic = Traffic(ours)
    for _ in range(3):
        ours(x).sum().backward()
        sent, fetched = traffic()
        assert (2 * adapter <= sent <= 2 * (adapter + 128), fetched) == (True, 0)
        ours(x).sum().backward()
        assert traffic() == (0, 0)
        optimizer.step()


def test_what_the_host_cannot_see_is_fetched_by_segment(wrap, small_segments):
    ours = wrap(nn.Sequential(linear(64, 64), linear(4, 64)), 3).eval()
    x = integers(6, 64).to(wrap.device())
    with torch.no_grad():
        ours(x)
        traffic = Traffic(ours)
        last = ours.module[1]
        last.weight.data[0, 0] += 1  # it is in a segment with its bias
        assert torch.equal(ours(x), ours.module(x))
        assert traffic() == (0, 2 * (last.weight.nbytes + last.bias.nbytes))
        ours(x)
        assert traffic() == (0, 0)


def test_what_a_graph_holds_and_has_not_changed_is_not_sent_again(wrap):
    ours = wrap(smooth_net(), 3)
    outs = [ours(integers(7, 3))]
    traffic = Traffic(ours)
    outs.append(ours(integers(7, 3)))
    assert traffic() == (0, 0)
    loss_of(sum(outs)).backward()
    ours(integers(7, 3))
    assert traffic() == (0, 0)


def test_what_a_replica_does_to_its_own_is_undone_in_the_next_forward(wrap):
    def spoils(m, x):
        out = x @ m.weight
        if x[0, 0] > 0 and x[0, 1] > 0:  # in the second replica
            m.weight.data.zero_()
        return out

    ours = wrap(module(spoils, weight=parameter(torch.ones(16, 16))), 3)
    x = torch.zeros(6, 16)
    x[2, :2] = 1
    with torch.no_grad():
        expected = ours(x)
        traffic = Traffic(ours)
        for _ in range(2):
            assert torch.equal(ours(x), expected)
            assert sum(traffic()) == 16 * 16 * 4


def test_little_is_sent_rather_than_compared(wrap, monkeypatch):
    ours = wrap(nn.Linear(16, 16), 3).eval()
    n_bytes = sum(p.nbytes for p in ours.parameters())
    x = integers(6, 16).float()
    with torch.no_grad():
        ours(x)
        traffic = Traffic(ours)
        monkeypatch.setattr(segments, "COMPARED_BYTES", n_bytes + 1)
        ours(x)
        assert traffic() == (2 * n_bytes, 0)
        monkeypatch.setattr(segments, "COMPARED_BYTES", n_bytes)
        ours(x)
        assert traffic() == (0, 0)


@pytest.mark.parametrize("option", ["foreign=2", "peers=0"])
def test_all_is_sent_where_kernels_cannot_read_the_model(option):
    """As with torch's expandable segments, or without peer access."""
    with fake_gpus.several(3, option):
        ours = Wrap(is_gpu=True)(norm_net(), 3).eval()
        x = integers(6, 16)
        n_bytes = sum(t.nbytes for t in (*ours.parameters(), *ours.buffers()))
        with torch.no_grad():
            expected = ours(x)
            before = sum(map(sum, sent_bytes(3))), fetched_bytes()
            assert torch.equal(ours(x), expected)
        assert fetched_bytes() == before[1]
        assert sum(map(sum, sent_bytes(3))) - before[0] >= 2 * n_bytes
        del ours
        gc.collect()


def test_ten_gpus_compare_what_the_first_has(monkeypatch):
    """Each has access to eight others; torch raises at that limit."""

    def limited(tensor, place, *args, to=torch.Tensor.to, **kwargs):
        if {str(tensor.device), str(place)} == {"gpu:0", "gpu:9"}:
            raise RuntimeError("CUDA error: peer mapping resources exhausted")
        return to(tensor, place, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", limited)
    with fake_gpus.several(10):
        twin = Twin(Wrap(is_gpu=True), smooth_net(), 10)
        x = integers(20, 3)
        twin.step(lambda model, x: model(x).sum(), x, exact=False)
        traffic = Traffic(twin.ours)
        with torch.no_grad():
            twin.ours(x)
        assert traffic() == (0, 0)
        del twin, traffic
        gc.collect()


def test_only_a_gpu_that_cannot_read_the_model_is_sent_all_of_it():
    with fake_gpus.several(3):
        fake().fake_part(0, 1)
        ours = Wrap(is_gpu=True)(norm_net(), 3).eval()
        x = integers(6, 16).to("gpu:0")
        n_bytes = sum(t.nbytes for t in (*ours.parameters(), *ours.buffers()))
        with torch.no_grad():
            expected = ours(x)
            traffic = Traffic(ours)
            assert torch.equal(ours(x), expected)
            assert n_bytes <= sum(traffic()) < 1.3 * n_bytes
            ours.module[2].bias.data.mul_(2)
            assert torch.allclose(ours(x), ours.module(x))
            assert traffic()[1] > 0
        del ours, traffic
        gc.collect()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_large_parameters_and_gradients_load_all_links_alike(wrap, monkeypatch, n):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 20)  # a third of a weight
    layers = integer_weights(nn.Linear(512, 1536, bias=False)), linear(512, 1536)
    twin = Twin(wrap, nn.Sequential(*layers), n)
    x, y = (integers(8, 512).to(wrap.device()) for _ in range(2))
    twin.ours(x)
    for model in twin.models:
        grow(model, 1)
    before = sent_bytes(n)
    (twin.ours(x) * y).sum().backward()
    moved = sent_bytes(n) - before
    (twin.plain(x.cpu()) * y.cpu()).sum().backward()
    twin.assert_same()
    n_bytes = sum(p.nbytes for p in twin.inner.parameters())
    rest = n_bytes // 40  # the bias, inputs, outputs, the rounding of shards
    for way in (moved.sum(0), moved.sum(1)):
        assert n_bytes <= way[0] <= n_bytes + rest
        assert way[1:].max() <= 2 * n_bytes + rest


def test_a_step_of_many_parameters_calls_the_driver_as_often_as_one_of_few(wrap):
    names = "cuLaunchKernel", "cuMemcpyPeerAsync", "cuEventRecord", "cuStreamWaitEvent"
    found = []
    for n_layers, is_hooked in (1, False), (16, False), (16, True):
        ours = wrap(nn.Sequential(*[linear(8, 8) for _ in range(n_layers)]), 3)
        for p in ours.parameters() if is_hooked else ():
            p.register_hook(lambda grad: None)
        for _ in range(3):
            before = counts(*names)
            ours(integers(6, 8)).square().sum().backward()
            grow(ours, 0.5)
        pairs = zip(counts(*names), before, strict=True)
        found.append([after - earlier for after, earlier in pairs])
    assert found[0] == found[1] == found[2]
    assert all(n > 0 for n in found[0])


def test_no_host_waits_for_a_device_in_a_step(wrap, small_segments):
    ours, x = wrap(smooth_net(), 4), integers(8, 3)
    waits = "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemFree"
    for _ in range(2):
        before = counts(*waits)
        ours(x).square().sum().backward()
        grow(ours, 0.9)
    assert counts(*waits) == before
