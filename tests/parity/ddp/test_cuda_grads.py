"""Where gradients on GPUs are, who may read them, and what a step calls for them."""

import ctypes

import paceline
import pytest
import torch
from gpus import on_gpus
from support import fake_gpus
from support.fake_gpus import environment  # noqa: F401  # for the ranks
from torch import nn

# ---- where they are -----------------------------------------------------------------


class Reader:
    """A stream of the user's, beside the one that backward runs on."""

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
        """Do what `host.copy_(grad, non_blocking=True)` does, behind backward."""
        host = torch.zeros_like(grad)
        to, source = (ctypes.c_void_p(t.data_ptr()) for t in (host, grad))
        n_bytes = ctypes.c_size_t(grad.nbytes)
        self.call("cuMemHostRegister_v2", to, n_bytes, 0)
        self.call("cuEventRecord", self.event, None)
        self.call("cuStreamWaitEvent", self.stream, self.event, 0)
        self.call("cuMemcpyDtoHAsync_v2", to, source, n_bytes, self.stream)
        self.read_into.append(host)

    def record_stream(self, grad):
        """Keep torch's own memory till the stream is done, as torch's allocator does.

        Of memory that is not its own it takes no notice.
        """
        if grad.untyped_storage().resizable():
            self.kept.append(grad)

    def close(self):
        fake_gpus.synchronize()
        for host in self.read_into:
            self.call("cuMemHostUnregister", ctypes.c_void_p(host.data_ptr()))
        self.call("cuEventDestroy_v2", self.event)
        self.call("cuStreamDestroy_v2", self.stream)
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self.call("cuDevicePrimaryCtxRelease_v2", 0)


@on_gpus(2)
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
def test_gradients_are_in_memory_of_torch_unless_views_are_asked_for(ranks, view):
    model = ranks.wrap(
        nn.Sequential(nn.Linear(6, 600), nn.Linear(600, 40)),
        gradient_as_bucket_view=view,
    )
    for _ in range(4):
        model.zero_grad()
        model(ranks.integers(2, 6)).sum().backward()
        grads = [p.grad for p in model.parameters()]
        are_views = [not g.untyped_storage().resizable() for g in grads]
        assert are_views == [view and g.nbytes >= 32 * 1024 for g in grads]


@on_gpus(2)
def test_ranks_that_disagree_about_views_are_told(ranks):
    words = "gradient_as_bucket_view differs"
    with pytest.raises(paceline.MismatchError, match=words):
        ranks.wrap(nn.Linear(1, 1), gradient_as_bucket_view=ranks.rank == 0)


# ---- what is called -----------------------------------------------------------------

CALLS = [
    "cuLaunchKernel",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "ncclAllReduce",
    "ncclBroadcast",
]


def count_calls():
    return [fake_gpus.fake().fake_count(name.encode()) for name in CALLS]


@on_gpus(2, cap=[25, 0.1, 0.05], buffers=[False, True], view=[False, True])
def test_a_step_makes_so_many_calls(ranks, cap, buffers, view):
    layers = [nn.Linear(100, 100, bias=False) for _ in range(6)]
    net = nn.Sequential(nn.BatchNorm1d(100, affine=False), *layers)
    model = ranks.wrap(
        net,
        bucket_cap_mb=cap,
        broadcast_buffers=buffers,
        gradient_as_bucket_view=view,
    )
    for _ in range(4):
        model.zero_grad()
        loss = model(torch.ones(2, 100)).sum()
        before = count_calls()
        loss.backward()
        n_calls = [now - then for now, then in zip(count_calls(), before, strict=True)]
    n_buckets = len(model._session.reducer.buckets)
    assert n_buckets == {25: 1, 0.1: 3, 0.05: 6}[cap]
    packs = ranks.rank == 0 and buffers
    assert dict(zip(CALLS, n_calls, strict=True)) == {
        "cuLaunchKernel": n_buckets + (not view) + packs,  # packed, copied back
        "cuEventRecord": 2 * n_buckets + 2 * buffers,  # packed, reduced
        "cuStreamWaitEvent": n_buckets + 1 + buffers,  # for packed; for all averages
        "cuStreamIsCapturing": 3,  # of backward's stream, of ours, of the caller's
        "ncclAllReduce": n_buckets,
        "ncclBroadcast": buffers,
    }
