"""What replicas on GPUs do besides: what is sent when, who waits, what goes wrong.

The devices are fakes: see support/fake_gpus.py.
"""

import collections
import copy
import ctypes
import gc
import weakref

import paceline
import pytest
import torch
from paceline import _gpu
from paceline._dp.gpus import segments
from replicas import (
    Twin,
    Wrap,
    assert_close,
    integer_weights,
    integers,
    loss_of,
    net,
    smooth_net,
)
from support import fake_gpus
from torch import nn


@pytest.fixture
def wrap():
    """Return a function that wraps a module for n replicas on GPUs."""
    with fake_gpus.several(4):
        yield Wrap(is_gpu=True)
        gc.collect()


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 256)


class Recorder:
    """Stands before a group's native side, and adds up the bytes that it moves."""

    def __init__(self, native):
        self._native = native
        self.bytes = collections.Counter()

    def __getattr__(self, name):
        return getattr(self._native, name)

    def broadcast(self, streams, ring, travelling):
        for _, _, n_bytes, blocks in travelling:
            self.bytes["there"] += n_bytes * sum(block is not None for block in blocks)
        self._native.broadcast(streams, ring, travelling)

    def sum(self, streams, rooms, rows, to):
        self.bytes["back"] += sum(row.nbytes for _, row in rows)
        self._native.sum(streams, rooms, rows, to)

    def copy(self, streams, source, tensors, target, places):
        if source != target:
            self.bytes["beside"] += sum(tensor.nbytes for tensor in tensors)
        self._native.copy(streams, source, tensors, target, places)


def record(ours):
    """Have a wrapper's group be recorded from now on."""
    group = ours._gpu_engine(ours.device_ids).group
    group.native = Recorder(group.native)
    return group.native.bytes


def count(function):
    fake = ctypes.CDLL(fake_gpus.library())
    return fake.fake_count(function.encode())


# ---- what is sent -------------------------------------------------------------------


def test_a_training_step_moves_each_byte_once(wrap, small_segments):
    module = integer_weights(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)))
    ours = wrap(module, 4)
    x = integers(8, 8)
    ours(x).sum().backward()
    torch.optim.SGD(module.parameters(), 1.0).step()
    moved = record(ours)
    ours(x).sum().backward()
    n_bytes = sum(p.nbytes for p in module.parameters())  # multiples of 64
    rows = 3 * x.nbytes // 4
    assert moved["there"] == moved["back"] == 3 * n_bytes
    assert moved["beside"] == 3 * rows  # inputs; outputs, and their gradients


def fetched_bytes():
    """Return what devices have fetched so far of what was not as member 0 had it."""
    fake = ctypes.CDLL(fake_gpus.library())
    fake.host_kernel_fetched.restype = ctypes.c_ulonglong
    return fake.host_kernel_fetched()


class Traffic:
    """Bytes of parameters and buffers that have travelled since this was asked last."""

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


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [(1, 4 << 20), (300 << 20, 4915200), (1400 << 20, 22937600), (1 << 40, 32 << 20)],
)
def test_large_models_have_larger_segments(n_bytes, expected):
    assert segments._segment_bytes(n_bytes) == expected
    assert expected % 64 == 0


def test_a_model_of_many_segments_trains(wrap, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 256)
    monkeypatch.setattr(segments, "_MOST_SEGMENTS", 2)
    twin = Twin(wrap, integer_weights(nn.Sequential(*[nn.Linear(6, 6)] * 3)), n=3)
    twin.ours.module.append(integer_weights(nn.Linear(6, 9)))
    twin.plain.append(copy.deepcopy(twin.ours.module[-1]))
    twin.step(lambda model, x: model(x).sum(), integers(7, 6))
    layout = twin.ours._gpu_engine(twin.ours.device_ids)._replicated._layout
    assert 256 < layout.segment_bytes < 2048
    assert layout.segment_bytes % 64 == 0
    assert any(len(s.tensors) > 1 and s.n_bytes > 256 for s in layout.segments)


def test_a_log_line_says_what_each_device_holds(wrap, caplog):
    ours = wrap(nn.Linear(512, 1024).float(), 2)
    with caplog.at_level("INFO", logger="paceline"):
        ours(torch.ones(4, 512))
        ours(torch.ones(4, 512))
    (line,) = [r.getMessage() for r in caplog.records if "MiB" in r.getMessage()]
    assert "2.0 MiB of parameters and buffers on each" in line
    assert "12.0 MiB on cpu, and in training 4.0 MiB on each other" in line


class DrawsAtLast(nn.Module):
    """Gives numbers of its own, but for two calls."""

    def __init__(self):
        super().__init__()
        self.is_drawing = False

    def forward(self, x):
        return torch.rand(len(x)) if self.is_drawing else x.sum(1)


def test_a_forward_that_begins_to_draw_is_told_of(wrap, caplog):
    ours, x = wrap(DrawsAtLast(), 2), integers(8, 3)
    for _ in range(2):
        ours(x)
    ours.module.is_drawing = True
    ours(x)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "paceline"]
    assert "drew random numbers of the CPU" in line
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(ours(x))
    assert torch.equal(*drawn)
    assert len(drawn[0].unique()) == 8


class CountsAnew(nn.Module):
    """Makes a buffer anew in each call, beside weights of some size."""

    def __init__(self):
        super().__init__()
        self.layer = integer_weights(nn.Linear(512, 64))
        self.register_buffer("n", torch.zeros(2))
        self.register_buffer("twice", torch.zeros(2))

    def forward(self, x):
        self.n = self.n + 1
        self.twice = 2 * self.n
        return self.layer(x) * self.twice[0]


def test_a_buffer_made_anew_has_no_other_tensor_sent_again(wrap):
    ours, plain = wrap(CountsAnew(), 3), CountsAnew()
    x = integers(6, 512)
    with torch.no_grad():
        ours(x), plain(x)
        traffic, layout = (
            Traffic(ours),
            ours._gpu_engine(ours.device_ids)._replicated._layout,
        )
        for _ in range(3):
            assert torch.equal(ours(x), plain(x))
            assert sum(traffic()) <= 2 * 2 * 64
        assert ours._gpu_engine(ours.device_ids)._replicated._layout is layout
        ours.module.twice = plain.twice = ours.module.n  # of one tensor, two names
        assert torch.equal(ours(x), plain(x))
        ours.module.n = plain.n = torch.zeros(3)
        assert torch.equal(ours(x), plain(x))
    assert_close(ours.module.twice, plain.twice)


def test_evaluation_after_evaluation_sends_no_parameter(wrap):
    ours = wrap(norm_net(), 3).eval()
    x = integers(6, 16)
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
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)).double()
    ours = wrap(net, 3).eval()
    x = integers(6, 64)
    with torch.no_grad():
        ours(x)
        traffic = Traffic(ours)
        weight = ours.module[1].weight
        weight.data[0, 0] += 1  # it is a segment
        assert torch.allclose(ours(x), ours.module(x))
        assert traffic() == (0, 2 * weight.nbytes)
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
    class Spoils(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 16))

        def forward(self, x):
            out = x @ self.weight
            if x[0, 0] > 0 and x[0, 1] > 0:  # in the second replica
                self.weight.data.zero_()
            return out

    ours = wrap(Spoils(), 3)
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
    """As with torch's expandable segments, and without peer access."""
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


def sent_bytes(n):
    """Return what each of n devices has sent to each."""
    fake = ctypes.CDLL(fake_gpus.library())
    fake.fake_sent_bytes.restype = ctypes.c_int64
    return [[fake.fake_sent_bytes(a, b) for b in range(n)] for a in range(n)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_large_parameters_and_gradients_load_all_links_alike(wrap, monkeypatch, n):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 20)  # a third of a weight
    module = integer_weights(
        nn.Sequential(nn.Linear(512, 1536, bias=False), nn.Linear(1536, 512))
    )
    expected = copy.deepcopy(module)
    ours = wrap(module, n)
    x, y = integers(8, 512), integers(8, 512)
    ours(x)
    module.load_state_dict(expected.state_dict())
    before = sent_bytes(n)
    (ours(x) * y).sum().backward()
    moved = [
        [after - earlier for after, earlier in zip(*rows, strict=True)]
        for rows in zip(sent_bytes(n), before, strict=True)
    ]
    (expected(x) * y).sum().backward()
    for ours_of, of in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours_of.grad, of.grad)
    n_bytes = sum(p.nbytes for p in module.parameters())
    rest = n_bytes // 40  # the bias, inputs, outputs, what a shard is rounded to
    for k in range(1, n):
        assert sum(row[k] for row in moved) <= 2 * n_bytes + rest
        assert sum(moved[k]) <= 2 * n_bytes + rest
    assert n_bytes <= sum(moved[0]) <= n_bytes + rest
    assert n_bytes <= sum(row[0] for row in moved) <= n_bytes + rest


def test_a_step_of_many_parameters_calls_the_driver_as_often_as_one_of_few(wrap):
    names = "cuLaunchKernel", "cuMemcpyPeerAsync", "cuEventRecord", "cuStreamWaitEvent"
    found = []
    for n_layers in (1, 16):
        layers = [nn.Linear(8, 8) for _ in range(n_layers)]
        ours = wrap(nn.Sequential(*layers).double(), 3)
        optimizer = torch.optim.SGD(ours.parameters(), 0.1)
        for _ in range(3):
            before = [count(name) for name in names]
            optimizer.zero_grad()
            ours(integers(6, 8)).square().sum().backward()
            optimizer.step()
        found.append([count(name) for name in names])
        found[-1] = [a - b for a, b in zip(found[-1], before, strict=True)]
    assert found[0] == found[1]
    assert all(n > 0 for n in found[0])


def test_no_host_waits_for_a_device_in_a_step(wrap, small_segments):
    ours = wrap(smooth_net(), 4)
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    x = integers(8, 3)

    def step():
        optimizer.zero_grad()
        ours(x).square().sum().backward()
        optimizer.step()

    step()
    waits = "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemFree"
    before = [count(name) for name in waits]
    step()
    assert [count(name) for name in waits] == before


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_is_written_through_data_is_seen_at_the_next_forward(
    wrap, trains, is_frozen
):
    """As with averages of weights for evaluation, and target networks."""
    ours = wrap(smooth_net(), 3).train(trains)
    ours.module.requires_grad_(not is_frozen)
    ours.module.register_buffer("scale", torch.ones(2).double())
    ours.module[2].register_forward_hook(lambda m, _, out: out * ours.module.scale)
    x = integers(7, 3)
    for _ in range(3):
        for tensor in (*ours.parameters(), *ours.buffers()):
            tensor.data.mul_(0.5)
        with torch.set_grad_enabled(trains):
            assert torch.allclose(ours(x), ours.module(x), rtol=1e-12)


def test_an_absent_replica_has_missed_nothing(wrap):
    twin = Twin(wrap, smooth_net(), 4)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in twin.models]
    for rows in (8, 2, 1, 8, 3):
        twin.zero()
        twin.step(lambda m, x: m(x).square().mean(), integers(rows, 3), exact=False)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            x = integers(9 - rows, 3)
            assert torch.allclose(twin.ours(x), twin.plain(x), rtol=1e-10)


# ---- gradients ----------------------------------------------------------------------


def test_a_step_between_forward_and_backward_is_an_error_as_with_the_module(wrap):
    ours = wrap(smooth_net(), 3)
    out = ours(integers(7, 3)).square().sum()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(1)
    ours(integers(7, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_parameter_that_forward_writes_leaves_its_neighbours_alone(wrap):
    """They lie in one block, and graphs have saved them."""

    class Following(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = smooth_net()
            self.mean = nn.Parameter(torch.zeros(2).double())

        def forward(self, x):
            out = self.inner(x)
            with torch.no_grad():
                self.mean.mul_(0.5).add_(1)
            return out

    twin = Twin(wrap, Following(), 3)
    for _ in range(2):
        twin.zero()
        twin.step(lambda m, x: loss_of(m(x)), integers(7, 3), exact=False)


def test_two_forwards_may_come_before_their_backwards(wrap, small_segments):
    twin = Twin(wrap, smooth_net(), 3)

    def loss(model, x, y):
        first, second = model(x), model(y)
        return loss_of(first) + loss_of(second.square())

    twin.step(loss, integers(7, 3), integers(5, 3, seed=1), exact=False)


def test_sixteen_bit_gradients_of_two_replicas_are_rounded_once(wrap):
    module = nn.Linear(4, 4, bias=False).bfloat16()
    ours = wrap(module, 2)
    torch.manual_seed(0)
    x = torch.randn(6, 4).bfloat16()
    ours(x).sum().backward()
    halves = [
        torch.autograd.grad(module(part).sum(), module.weight)[0]
        for part in (x[:3], x[3:])
    ]
    assert torch.equal(module.weight.grad, halves[0] + halves[1])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_runs_have_the_same_bits(wrap, small_segments, n):
    grads = []
    for _ in range(2):
        ours = wrap(smooth_net(), n)
        ours(integers(11, 3)).exp().sum().backward()
        grads.append([p.grad for p in ours.parameters()])
    for first, second in zip(*grads, strict=True):
        assert torch.equal(first, second)


def test_gradients_do_not_share_a_count_of_versions(wrap):
    module = net()
    ours = wrap(module, 2)
    x = integers(7, 3)
    weight, bias = torch.autograd.grad(
        ours(x).sum(), [module[2].weight, module[2].bias]
    )
    before = bias._version
    weight.zero_()
    assert bias._version == before


def test_tensors_that_no_block_can_hold_travel_by_themselves(wrap):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Embedding(9, 3, sparse=True)
            self.gap = nn.Parameter(torch.empty(0))
            self.register_buffer("mask", torch.eye(3).to_sparse().double())
            self.double()

        def forward(self, i):
            mine = self.rows.weight, self.gap, self.mask._values()
            seen.append([tensor.data_ptr() for tensor in mine])
            return self.rows(i) @ self.gap.t() + (self.mask @ self.gap[:3].t()).sum()

    seen = []
    torch.manual_seed(0)
    twin = Twin(wrap, Mixed(), 3)
    for module in (twin.plain, twin.inner):  # a copy is dense
        module.gap = nn.Parameter(integers(4, 6)[:, ::2])
    i = torch.arange(7)
    for model in reversed(twin.models):
        loss_of(model(i)).backward()
    for of_one_tensor in zip(*seen[:3], strict=True):  # each replica has its own
        assert len(set(of_one_tensor)) == 3
    sparse = [m.rows.weight.grad for m in (twin.inner, twin.plain)]
    assert all(grad.is_sparse for grad in sparse)
    assert torch.equal(*(grad.to_dense() for grad in sparse))
    assert torch.allclose(twin.inner.gap.grad, twin.plain.gap.grad, rtol=1e-12)


def test_sparse_and_dense_gradients_of_one_tensor_add_up(wrap):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(integers(5, 3).clone())

        def forward(self, i):
            looked_up = nn.functional.embedding(i, self.table, sparse=True)
            return looked_up if int(i[0]) < 4 else looked_up * self.table.sum()

    for rows in ([0, 1, 2, 3], [0, 1, 4, 4], [4, 4, 0, 1]):
        twin = Twin(wrap, Both(), 2)
        i = torch.tensor(rows)
        loss_of(twin.ours(i)).backward()
        expected = sum(
            torch.autograd.grad((part * w).sum(), twin.plain.table, retain_graph=True)[
                0
            ].to_dense()
            for part, w in zip(
                (twin.plain(i[:2]), twin.plain(i[2:])),
                torch.arange(1.0, 13).double().reshape(2, 2, 3),
                strict=True,
            )
        )
        found = twin.inner.table.grad
        assert torch.equal(found.to_dense() if found.is_sparse else found, expected)


def test_strides_of_parameters_are_kept(wrap):
    seen = []

    class Conv(nn.Conv2d):
        def forward(self, x):
            seen.append(self.weight.stride())
            return super().forward(x)

    module = Conv(4, 4, 3).double().to(memory_format=torch.channels_last)
    ours = wrap(module, 3)
    plain = copy.deepcopy(module)
    x = integers(6, 4, 5, 5)
    for model in (ours, plain):
        loss_of(model(x)).backward()
    assert set(seen) == {module.weight.stride()}
    assert torch.allclose(module.weight.grad, plain.weight.grad, rtol=1e-10)


# ---- places -------------------------------------------------------------------------


def test_all_gpus_are_used_unless_some_are_named(wrap):
    ours = paceline.DataParallel(net())
    assert ours.device_ids == [0, 1, 2, 3]
    assert ours.output_device == 0
    x = integers(7, 3)
    assert torch.equal(ours(x), ours.module(x))


@pytest.mark.parametrize("ids", [[0, 0], [1, 0], [0, 2, 0], ["cuda:1", "cuda:3"], [2]])
@pytest.mark.parametrize("output", [None, 1, -1, "cuda:2", "cpu"])
def test_devices_may_be_named_in_any_order_and_more_than_once(wrap, ids, output):
    twin = Twin(lambda m, n: paceline.DataParallel(m, ids, output), smooth_net())
    for _ in range(2):
        twin.zero()
        x = integers(7, 3).requires_grad_()
        twin.step(lambda m, x: m(x).square().mean(), x, exact=False)
    assert len(twin.ours.device_ids) == len(ids)


def test_a_gpu_that_is_not_there_is_named(wrap):
    with pytest.raises(ValueError, match=r"device_ids is \[0, 4\], and .* 4 CUDA dev"):
        paceline.DataParallel(net(), [0, 4])
    with pytest.raises(ValueError, match=r"output_device is 7, and .* 4 CUDA devices"):
        paceline.DataParallel(net(), [0, 1], 7)


def test_a_module_elsewhere_is_an_error_that_says_how_to_move_it(wrap, monkeypatch):
    ours = wrap(net(), 2)
    monkeypatch.setattr(_gpu.machine, "index_of_tensor", lambda *_: 3)
    words = r"on device cpu \(device_ids\[0\]\) but found one of them on .*module.to"
    with pytest.raises(RuntimeError, match=words):
        ours(integers(7, 3))


def test_the_cpu_is_used_beside_gpus_where_it_is_named_alone(wrap, monkeypatch):
    monkeypatch.setenv("PACELINE_CPU_REPLICAS", "2")
    assert paceline.DataParallel(net()).device_ids == [0, 1, 2, 3]
    assert paceline.DataParallel(net(), [2, 0]).device_ids == [2, 0]
    ours = paceline.DataParallel(net(), ["cpu"] * 2)
    x = integers(7, 3)
    assert torch.allclose(ours(x), ours.module(x))


def test_devices_that_differ_are_warned_of(wrap, monkeypatch):
    monkeypatch.setattr(_gpu.machine, "size", lambda index: (8 << index, 1))
    with pytest.warns(UserWarning, match="GPU 0 has less than 75% of the mem"):
        wrap(net(), 2)


def test_a_capture_round_the_wrapper_is_an_error(wrap, monkeypatch):
    ours, x = wrap(net(), 2), integers(7, 3)
    ours(x)
    scattered = ours.scatter((x,), {}, [0, 1])
    monkeypatch.setattr(_gpu.machine, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph is being captured round a Data"):
        ours(x)
    with pytest.raises(RuntimeError, match="CUDA graph is being captured round a Data"):
        ours.scatter((x,), {}, [0, 1])
    monkeypatch.setattr(ours, "scatter", lambda *_: scattered)
    with pytest.raises(RuntimeError, match="CUDA graph is being captured round a Data"):
        ours(x)


def test_inputs_from_the_host_go_through_pinned_memory(wrap, monkeypatch):
    pinned = []
    ours = wrap(net(), 2)
    monkeypatch.setattr(_gpu.machine, "index_of_tensor", lambda tensor, expected: None)
    monkeypatch.setattr(_gpu.machine, "pinned", lambda t: pinned.append(t) or t)
    x = integers(1 << 13, 3)
    scattered, _ = ours.scatter((x,), {}, [0, 1])
    assert torch.equal(torch.cat([args[0] for args in scattered]), x)
    assert [len(t) for t in pinned] == [1 << 12] * 2
    ours.scatter((x[:4],), {}, [0, 1])
    assert len(pinned) == 2  # a few bytes are not worth it


def test_check_compares_a_model_where_it_is(wrap):
    report = paceline.check(smooth_net(), integers(7, 3), replicas=3)
    assert report.ok, str(report)
    assert report.n_replicas == 3
    assert paceline.check(smooth_net(), {"input": integers(7, 3)}, replicas=5).ok


# ---- failures and ends --------------------------------------------------------------


def _error_of(call):
    try:
        call()
    except OSError as error:
        return str(error)


def test_a_call_of_the_driver_that_fails_is_an_error_and_the_next_one_works(wrap):
    fake = ctypes.CDLL(fake_gpus.library())
    ours = wrap(smooth_net(), 3)
    x = integers(7, 3)
    ours(x).sum().backward()
    ours.zero_grad()
    expected = torch.autograd.grad(ours.module(x).sum(), list(ours.parameters()))
    for name in ("cuEventRecord", "cuStreamWaitEvent", "cuMemcpyPeerAsync"):
        for nth in range(1, 40, 3):
            fake.fake_fail(name.encode(), nth, 999)
            said = None
            while said is None:  # it may be the second step's call
                ours.zero_grad()
                said = _error_of(lambda: ours(x).sum().backward())
            assert "CUDA error 999" in said
            ours.zero_grad()
            ours(x).sum().backward()
            for p, grad in zip(ours.parameters(), expected, strict=True):
                assert torch.allclose(p.grad, grad, rtol=1e-10)


def test_a_wrapper_takes_its_threads_and_memory_along(wrap):
    ours = paceline.DataParallel(smooth_net(), [0, 1, 2])
    for _ in range(3):
        ours(integers(7, 3)).sum().backward()
    alive = weakref.ref(ours)
    engine = ours._gpu_engine(ours.device_ids)
    block = weakref.ref(engine._replicated._layout.segments[0].blocks[1])
    threads = set(engine._threads._threads)
    assert len(threads) == 2
    del ours, engine
    gc.collect()
    assert alive() is None
    assert block() is None
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
