"""Tests that need simulated CUDA and NCCL: of calls, memory and refusals.

`tests/gpu/check_*.py` check what can also be seen on hardware.
"""

import ctypes
import dataclasses
import gc

import paceline
import pytest
import torch
from cases import assert_equal, mean_over, step_of
from gpus import on_gpus
from paceline import _gpu, _native
from paceline._ddp import placement
from support import fake_gpus
from support.fake_gpus import environment  # noqa: F401  # for the ranks
from torch import nn

CALLS = [
    "cuLaunchKernel",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "ncclAllReduce",
    "ncclBroadcast",
]
WAITS = [  # calls that wait, and calls that allocate
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostAlloc",
    "cuEventCreate",
    "cuStreamCreateWithPriority",
]


def count(*names):
    return [fake_gpus.fake().fake_count(name.encode()) for name in names]


def live():
    gc.collect()
    return fake_gpus.fake().fake_live_objects()


def one_linear(ranks, model, steps=3):
    """Train a layer with exact gradients."""
    for step in range(steps):
        model.zero_grad()
        x = ranks.n * ranks.integers(4, 6, key=step)
        model(x).sum().backward()
        rows = ranks.all(x.sum(0))
        for row in model.module.weight.grad:
            assert_equal(row, mean_over(rows), f"step {step}")


# ---- where gradients are ------------------------------------------------------------


class Reader:
    """A stream of the user, besides the one on which backward runs."""

    def __init__(self):
        self.fake, self.read_into, self.kept = fake_gpus.fake(), [], []
        context, self.stream, self.event = (ctypes.c_void_p() for _ in range(3))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.call("cuEventCreate", ctypes.byref(self.event), 2)

    def call(self, name, *arguments):
        assert getattr(self.fake, name)(*arguments) == 0, name

    def read(self, grad):
        """Do as `host.copy_(grad, non_blocking=True)` does, after backward."""
        host = torch.zeros_like(grad)
        to, source = (ctypes.c_void_p(t.data_ptr()) for t in (host, grad))
        n_bytes = ctypes.c_size_t(grad.nbytes)
        self.call("cuMemHostRegister_v2", to, n_bytes, 0)
        self.call("cuEventRecord", self.event, None)
        self.call("cuStreamWaitEvent", self.stream, self.event, 0)
        self.call("cuMemcpyDtoHAsync_v2", to, source, n_bytes, self.stream)
        self.read_into.append(host)

    def record_stream(self, grad):
        """Keep memory until the stream is done, as torch's allocator does."""
        self.kept.append(grad)

    def close(self):
        fake_gpus.synchronize()
        for host in self.read_into:
            self.call("cuMemHostUnregister", ctypes.c_void_p(host.data_ptr()))
        self.call("cuEventDestroy_v2", self.event)
        self.call("cuStreamDestroy_v2", self.stream)
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self.call("cuDevicePrimaryCtxRelease_v2", 0)


@on_gpus()
def test_a_gradient_may_be_read_on_another_stream_and_dropped(ranks):
    model = ranks.wrap(nn.Linear(600, 40, bias=False))  # 96 kB
    weight, reader = model.module.weight, Reader()
    for step in range(4):
        model(torch.full((1, 600), float(step))).sum().backward()
        reader.read(weight.grad)
        reader.record_stream(weight.grad)
        weight.grad = None
    reader.close()
    read = [host.unique().tolist() for host in reader.read_into]
    assert read == [[0.0], [1.0], [2.0], [3.0]]


@on_gpus(2, view=[False, True])
def test_gradients_are_parts_of_one_tensor_if_views_are_asked_for(ranks, view):
    model = ranks.wrap(
        nn.Sequential(nn.Linear(6, 600), nn.Linear(600, 40)),
        gradient_as_bucket_view=view,
    )
    for _ in range(4):
        step_of(model, ranks.integers(2, 6))
        grads = [p.grad for p in model.parameters()]
        are_views = [g.untyped_storage().nbytes() > g.nbytes for g in grads]
        assert are_views == [view and g.nbytes >= 32 * 1024 for g in grads]
        assert not any(g._is_view() or g.requires_grad for g in grads)


@on_gpus(2)
def test_a_view_is_the_same_tensor_in_each_step_but_not_beyond_a_new_layout(ranks):
    model = ranks.wrap(nn.Linear(600, 40, bias=False), gradient_as_bucket_view=True)
    weight, kept = model.module.weight, []
    for step in range(5):
        model(torch.full((1, 600), float(step))).sum().backward()
        kept.append(weight.grad)
        weight.grad = None
    fake_gpus.synchronize()
    # The second step lays out the buckets in the order that the first has shown.
    assert [grad.unique().tolist() for grad in kept] == [[0.0]] + [[4.0]] * 4
    assert kept[1] is kept[4] is not kept[0]
    kept[1].requires_grad_()  # the user's affair; the next step needs another
    model(torch.full((1, 600), 5.0)).sum().backward()
    assert weight.grad is not kept[1]


@on_gpus(2, how=["as before", "by a copy", "beside a buffer with gaps"])
def test_a_graph_that_has_saved_a_view_does_not_go_backward_after_the_next(ranks, how):
    net = nn.Linear(600, 40, bias=False)
    if how == "beside a buffer with gaps":
        net.register_buffer("gaps", torch.ones(4, 6)[:, ::2])
    model = ranks.wrap(net, gradient_as_bucket_view=True)
    for _ in range(3):
        net.weight.grad = None
        model(torch.ones(1, 600)).sum().backward()
    kept, net.weight.grad = net.weight.grad, None
    penalty = (torch.ones_like(kept, requires_grad=True) * kept).sum()
    if how == "by a copy":
        net.weight.register_post_accumulate_grad_hook(lambda p: None)
    model(torch.ones(1, 600)).sum().backward()
    assert (net.weight.grad is kept) == (how != "by a copy")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


@on_gpus(2)
def test_a_view_outlives_its_wrapper(ranks):
    one_linear(ranks, ranks.wrap(nn.Linear(6, 3)))  # opens what stays open
    ranks.all(None)
    before, module = live(), nn.Linear(600, 40, bias=False)
    model = ranks.wrap(module, gradient_as_bucket_view=True)
    for _ in range(3):
        module.weight.grad = None
        model(torch.ones(1, 600)).sum().backward()
    del model
    ranks.all(None)
    fake_gpus.fake().fake_torch_settle()
    assert live() == before + 1
    assert module.weight.grad.unique().tolist() == [1.0]
    module.weight.grad = None
    assert live() == before


# ---- calls --------------------------------------------------------------------------


@on_gpus(2, cap=[25, 0.1, 0.05], buffers=[False, True], view=[False, True])
def test_a_step_makes_so_many_calls_waits_for_nothing_and_does_not_allocate(
    ranks, cap, buffers, view
):
    layers = [nn.Linear(100, 100, bias=False) for _ in range(6)]
    net = nn.Sequential(nn.BatchNorm1d(100, affine=False), *layers)
    model = ranks.wrap(
        net, bucket_cap_mb=cap, broadcast_buffers=buffers, gradient_as_bucket_view=view
    )
    for _ in range(4):
        model.zero_grad()
        waits = count(*WAITS)
        loss = model(torch.ones(2, 100)).sum()
        before = count(*CALLS)
        loss.backward()
        n_calls = [now - then for now, then in zip(count(*CALLS), before, strict=True)]
    assert count(*WAITS) == waits
    n_buckets = len(model._session.reducer.buckets)
    assert n_buckets == {25: 1, 0.1: 3, 0.05: 6}[cap]
    packs = ranks.rank == 0 and buffers
    assert dict(zip(CALLS, n_calls, strict=True)) == {
        "cuLaunchKernel": n_buckets + (not view) + packs,  # to pack, and to copy back
        "cuEventRecord": 2 * n_buckets + 2 * buffers,  # after packing, after reduction
        "cuStreamWaitEvent": n_buckets + 1 + buffers,  # after packing; for all averages
        "cuStreamIsCapturing": 3,  # of the streams of backward, ours and the caller
        "ncclAllReduce": n_buckets,
        "ncclBroadcast": buffers,
    }


# ---- arguments ----------------------------------------------------------------------


class Echo(nn.Linear):
    def forward(self, *args, **kwargs):
        return args, kwargs


@on_gpus(1, 2, given=[[0], ["cuda:0"], None])
def test_device_ids_say_whether_inputs_are_moved(ranks, given):
    model = ranks.wrap(Echo(6, 3), device_ids=given)
    assert model.device_ids == (None if given is None else [0])
    assert model.output_device == (None if given is None else 0)
    if given is not None:
        data = model._get_ddp_logging_data()
        assert (data["device_ids"], data["output_device"]) == ("0", 0)
    move, moved = model.to_kwargs, []
    model.to_kwargs = lambda *args: (moved.append(args), move(*args))[1]
    x = torch.ones(())
    assert model(x)[0][0] is x  # it is on the GPU already
    assert model() == ((), {})
    assert not moved
    given_dict, given_list = {"y": x}, [x, 3]
    args, kwargs = model(given_dict, "word", z=given_list)
    assert len(moved) == (given is not None)
    assert (args, kwargs) == ((given_dict, "word"), {"z": given_list})
    assert (args[0] is given_dict) == (given is None)  # torch makes new containers
    args, kwargs = model._pre_forward(given_dict)
    assert (args[0] is given_dict) == (given is None)
    model._post_forward(None)


@on_gpus()
def test_device_ids_follow_a_module_that_is_moved(ranks):
    model = ranks.wrap(nn.Linear(6, 3), device_ids=[0])
    for is_there in (True, False, True):  # like model.cpu() and model.cuda()
        _gpu.machine.is_there = is_there
        model.module.double()
        model(ranks.integers(4, 6, dtype=torch.float64)).sum().backward()
        assert model.device_ids == ([0] if is_there else None)
        model.module.float()
        before = count("ncclAllReduce")
        one_linear(ranks, model)
        assert (count("ncclAllReduce") > before) == is_there


SIZES = {
    "default": ({}, [6, 1]),  # the last bucket is small
    "2 MiB": ({"bucket_cap_mb": 2.0}, [2, 2, 2, 1]),
    "small": ({"bucket_cap_mb": 0.05}, [1] * 7),
    "listed": ({"bucket_cap_mb_list": [1, 2, 4]}, [1, 2, 4]),
}


@on_gpus(2, which=[*SIZES])
def test_buckets_are_as_large_as_asked_for(ranks, which):
    options, sizes = SIZES[which]
    net = nn.ParameterList(torch.zeros(1 << 18) for _ in range(7))  # 1 MiB each
    buckets = ranks.wrap(net, **options)._session.reducer.buckets
    assert [len(bucket) for bucket in buckets] == sizes


@on_gpus()
def test_more_ranks_than_can_share_memory_train_over_the_group(ranks):
    most = _native.MAX_SHARED_MEMORY_RANKS, _native.MAX_HOSTS
    _native.MAX_SHARED_MEMORY_RANKS = _native.MAX_HOSTS = 1
    try:
        model = ranks.wrap(nn.Linear(6, 3))
    finally:
        _native.MAX_SHARED_MEMORY_RANKS, _native.MAX_HOSTS = most
    assert model._session.world.uses_group
    one_linear(ranks, model)


# ---- refusals -----------------------------------------------------------------------


def leave_on_the_cpu(patch):
    """Have errors name a module on a simulated GPU as on the GPU, not the CPU."""
    open_gpu = placement.open_gpu

    def open_and_rename(*args, **named):
        gpu, here = open_gpu(*args, **named)
        return gpu, dataclasses.replace(here, device="cuda:0")

    patch.setattr(placement, "open_gpu", open_and_rename)


ON_RANK_1 = {  # name: (the difference, the error's type, its message)
    "no GPU": (
        {"why_unusable": lambda: "torch sees no CUDA device"},
        NotImplementedError,
        "torch sees no CUDA device",
    ),
    "no NCCL": (
        {"PACELINE_LIBNCCL": "/nowhere/libnccl.so.2"},
        NotImplementedError,
        "PACELINE_LIBNCCL.*Tried: /nowhere/libnccl",
    ),
    "another NCCL": (
        {"nccl_version": lambda path: 22705},
        paceline.MismatchError,
        r"rank 0 has NCCL 2\.28\.9, rank 1 has 2\.27\.5",
    ),
    "a module on the CPU": (
        {"is_there": False},
        paceline.MismatchError,
        "0's module is on cuda:0, rank 1's on c",
    ),
    "device_ids of two": ({"device_ids": [0, 1]}, ValueError, "device"),
    "device_ids of another": ({"device_ids": [1]}, ValueError, "device"),
    "device_ids of the CPU": ({"device_ids": ["cpu"]}, ValueError, "device"),
    "views of buckets": (
        {"gradient_as_bucket_view": True},
        paceline.MismatchError,
        "gradient_as_bucket_view differs",
    ),
}


def refused(ranks, kind, words, **options):
    """Check that wrapping raises the same error on every rank and leaves nothing."""
    net = nn.Linear(6, 3)
    ranks.all(None)
    before = live()
    with pytest.raises(kind, match=words) as caught:
        ranks.wrap(net, **options)
    said = str(caught.value)
    del caught
    ranks.all(None)
    fake_gpus.synchronize()
    assert live() <= before
    assert len({row.rpartition("rank 1: ")[2] for row in ranks.all(said)}) == 1


@on_gpus(2, what=[*ON_RANK_1])
def test_what_one_rank_cannot_use_is_told_to_all(ranks, what):
    changes, kind, words = ON_RANK_1[what]
    one_linear(ranks, ranks.wrap(nn.Linear(6, 3)))  # opens all that is opened only once
    options = {"device_ids": [0]} if "device_ids" in changes else {}
    with pytest.MonkeyPatch.context() as patch:
        if what == "a module on the CPU":
            leave_on_the_cpu(patch)
        for name, value in changes.items() if ranks.rank == 1 else ():
            if name.isupper():
                patch.setenv(name, value)
            elif hasattr(_gpu.machine, name):
                patch.setattr(_gpu.machine, name, value)
            else:
                options[name] = value
        refused(ranks, kind, words, **options)
    one_linear(ranks, ranks.wrap(nn.Linear(6, 3)))


@on_gpus()
def test_two_ranks_on_one_gpu_are_refused_on_both(ranks):
    one_linear(ranks, ranks.wrap(nn.Linear(6, 3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gpu.machine, "identity", lambda index, version: "GPU 7")
        refused(ranks, ValueError, "Duplicate GPU detected: ranks 0 and 1 .* GPU 7")
        patch.setenv("NCCL_HOSTID", f"host {ranks.rank}")
        one_linear(ranks, ranks.wrap(nn.Linear(6, 3)))
