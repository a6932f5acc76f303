"""Replicas on GPUs: their devices, failures, and end.

The devices are simulated: see support/fake_gpus.py.
"""

import ctypes
import gc
import threading
import weakref

import paceline
import pytest
import torch
from paceline import _gpu, _native
from paceline._dp import functional, segments
from programs import module
from replicas import (
    Twin,
    Wrap,
    accumulate,
    assert_same,
    assert_same_grads,
    integers,
    loss_of,
    moved,
    net,
    smooth_net,
    step,
)
from support import fake_gpus
from support.waiting import once_collected
from torch import nn

DeviceGroup = _native.DeviceGroup


@pytest.fixture
def wrap(wrap_on_gpus):
    return wrap_on_gpus


def test_sixteen_bit_gradients_of_two_replicas_are_rounded_once(wrap):
    module = nn.Linear(4, 4, bias=False).bfloat16()
    ours = wrap(module, 2)
    torch.manual_seed(0)
    x = torch.randn(6, 4).bfloat16().to(wrap.device())
    ours(x).sum().backward()
    halves = [
        torch.autograd.grad(module(part).sum(), module.weight)[0]
        for part in (x[:3], x[3:])
    ]
    assert torch.equal(module.weight.grad, halves[0] + halves[1])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_runs_have_the_same_bits(wrap, monkeypatch, n):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 256)
    runs = [wrap(smooth_net(), n) for _ in range(2)]
    for ours in runs:
        ours(integers(11, 3)).exp().sum().backward()
    assert_same_grads(*runs)


def test_all_gpus_are_used_unless_some_are_named(wrap):
    ours = wrap(net(), device_ids=None)
    assert ours.device_ids == [0, 1, 2, 3]
    assert ours.output_device == 0
    x = integers(7, 3).to(wrap.device())
    assert torch.equal(ours(x), ours.module(x))


IDS = [[0, 0], [1, 0], [0, 2, 0], ["cuda:1", "cuda:3"], [2]]
OUTPUTS = [None, 1, -1, "cuda:2", "cpu"]


@pytest.mark.parametrize(
    ("ids", "output"),
    [*((ids, None) for ids in IDS), *(([1, 0, 2], output) for output in OUTPUTS)],
)
def test_devices_may_be_named_in_any_order_and_more_than_once(wrap, ids, output):
    twin = Twin(wrap, smooth_net(), device_ids=ids, output_device=output)
    for _ in range(2):
        twin.zero()
        x = integers(7, 3).requires_grad_()
        twin.step(lambda m, x: m(x).square().mean(), x, exact=False)
    assert len(twin.ours.device_ids) == len(ids)


MIXED = {
    "add": torch.add,
    "in place": torch.Tensor.add_,
    "matrices": torch.mm,
    "cat": lambda a, b: torch.cat([a, b]),
    "linear": nn.functional.linear,
}


@pytest.mark.parametrize("operation", MIXED.values(), ids=MIXED)
def test_tensors_of_two_devices_in_one_operation_are_an_error(wrap, operation):
    """Otherwise the simulated devices would hide a tensor on the wrong one."""
    places = wrap.device(0), wrap.device(1), torch.device("cpu")
    first, second, host = (torch.ones(2, 2, device=place) for place in places)
    for pair in ((first, second), (second, host), (host, second)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the"):
            operation(*pair)


def test_a_gpu_that_is_not_there_is_named(wrap):
    with pytest.raises(ValueError, match=r"device_ids is \[0, 4\], and .* 4 CUDA dev"):
        paceline.DataParallel(net(), [0, 4])
    with pytest.raises(ValueError, match=r"output_device is 7, and .* 4 CUDA devices"):
        paceline.DataParallel(net(), [0, 1], 7)


@pytest.mark.parametrize("device", ["cpu", "gpu:3"])
def test_a_module_elsewhere_is_an_error_that_says_how_to_move_it(wrap, device):
    ours = paceline.DataParallel(net().to(device), [0, 1])
    words = r"on device gpu:0 \(device_ids\[0\]\) but found one of them on device: "
    with pytest.raises(RuntimeError, match=f"{words}{device}; .*module.to.'gpu:0'"):
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
    scattered = ours.scatter((x,), {}, [0, 1])
    monkeypatch.setattr(_gpu.machine, "is_capturing", lambda: True)
    captured = pytest.raises(
        RuntimeError, match="CUDA graph is being captured round a D"
    )
    with captured:
        ours(x)
    with captured:
        ours.scatter((x,), {}, [0, 1])
    monkeypatch.setattr(ours, "scatter", lambda *_: scattered)
    with captured:
        ours(x)


def test_inputs_from_the_host_go_through_pinned_memory(wrap, monkeypatch):
    pinned = []
    ours = wrap(net(), 2)
    monkeypatch.setattr(_gpu.machine, "pinned", lambda t: pinned.append(t) or t)
    x = integers(1 << 13, 3)
    scattered, _ = ours.scatter((x,), {}, [0, 1])
    assert torch.equal(torch.cat([args[0].cpu() for args in scattered]), x)
    assert [len(t) for t in pinned] == [1 << 12] * 2
    ours.scatter((x[:4],), {}, [0, 1])
    assert len(pinned) == 2  # a few bytes are not worth it


class Shifted(torch.nn.Linear):
    def forward(self, x, by):
        return super().forward(x) + by


def test_check_compares_a_model_where_it_is(wrap):
    model = smooth_net().to(wrap.device())
    x = integers(7, 3).to(wrap.device())
    report = paceline.check(model, x, replicas=3)
    assert report.ok, str(report)
    assert report.n_replicas == 3
    assert paceline.check(model, {"input": x}, replicas=5).ok
    shifted, by = Shifted(3, 3).to(x), paceline.replicate(integers(3))
    assert paceline.check(shifted, (x, by)).ok


def test_a_call_of_the_driver_that_fails_is_an_error_and_the_next_one_works(wrap):
    fake = ctypes.CDLL(fake_gpus.library())
    twin = Twin(wrap, smooth_net(), 3)

    def train(n=1):
        for _ in range(n):
            twin.ours.zero_grad()
            accumulate(twin.ours, 1)

    train()
    accumulate(twin.plain, 1)
    for name in ("cuEventRecord", "cuStreamWaitEvent", "cuMemcpyPeerAsync"):
        for nth in range(1, 40, 3):
            fake.fake_fail(name.encode(), nth, 999)
            with pytest.raises(OSError, match="CUDA error 999"):
                train(40)  # a later step may make that call
            train()
            twin.assert_same(exact=False)


def test_a_wrapper_takes_its_threads_and_memory_along(wrap):
    before, ours = set(threading.enumerate()), wrap(smooth_net(), 3)
    for _ in range(3):
        ours(integers(7, 3)).sum().backward()
    alive = weakref.ref(ours)
    engine = ours._engine_for(ours.device_ids)
    block = weakref.ref(engine._replicated._layout.segments[0].blocks[1])
    began = set(threading.enumerate()) - before
    threads = {thread for thread in began if "paceline-replica" in thread.name}
    assert len(threads) == 2
    del ours, engine
    assert once_collected(lambda: alive() is block() is None)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_the_function_runs_side_by_side_from_the_second_call_and_holds_no_module(wrap):
    def forward(m, x):
        m.threads.append(threading.current_thread().name)
        return m.layers(x)

    plain = net()
    made = moved(module(forward, layers=net(), threads=[]), wrap.device())
    for seed in range(3):
        x = integers(7, 3, seed=seed)
        outs = [plain(x), paceline.data_parallel(made, x.to(wrap.device()), [0, 1, 2])]
        assert_same(outs[1].cpu(), outs[0])
        for out in outs:
            loss_of(out).backward()
    assert_same_grads(made.layers, plain)
    (caller,) = set(made.threads[:3])
    for threads in (made.threads[3:6], made.threads[6:]):
        assert sorted(threads)[1:] == ["paceline-replica-1", "paceline-replica-2"]
        assert sorted(threads)[0] == caller
    tensors = [weakref.ref(p) for p in made.parameters()]
    del made, outs, out
    assert once_collected(lambda: all(alive() is None for alive in tensors))
    assert len(functional._engines) == 0


def test_gpus_that_get_other_bytes_than_were_sent_are_one_clear_error():
    with fake_gpus.several(3, "corrupt_peers=1"):
        ours = paceline.DataParallel(net().to("gpu"), [0, 1, 2])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="gpu:0 sends to gpu:1 arrives as"):
                ours(integers(7, 3).to("gpu"))


class WrongKernels:
    """A native group whose kernels copy nothing."""

    def __init__(self, devices):
        self.native = DeviceGroup(devices)

    def __getattr__(self, name):
        return getattr(self.native, name)

    def broadcast(self, streams, ring, segments, sums):
        if sums is None:
            self.native.broadcast(streams, ring, segments)


@pytest.mark.parametrize(
    ("option", "kind", "words"),
    [
        ("peers=205", DeviceGroup, "the driver refuses peer access between {}"),
        ("peers=1", WrongKernels, "kernels of {} read wrong bytes: all"),
    ],
)
def test_peers_that_cannot_be_read_are_told_of_once(
    option, kind, words, caplog, monkeypatch
):
    monkeypatch.setattr(_native, "DeviceGroup", kind)
    with fake_gpus.several(3, option):
        for _ in range(2):
            twin = Twin(Wrap(is_gpu=True), net(), 3)
            for seed in range(2):
                twin.step(step, integers(7, 3, seed=seed))
            del twin
            gc.collect()
        lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    for line, pair in zip(lines, ("gpu:0 and gpu:1", "gpu:0 and gpu:2"), strict=True):
        assert line.startswith(words.format(pair))
