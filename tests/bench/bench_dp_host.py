"""Host time of DataParallel on GPUs, with simulated CUDA: no GPU is timed.

    PYTHONPATH=tests python tests/bench/bench_dp_host.py [devices]

The models are a transformer of 12 narrow layers, and 50 convolutions with norms, with
as many segments as in a large model.  Prints the CPU milliseconds of the calling thread
before replicas start and in backward's nodes, which pack and sum; the driver calls per
step; and the time of torch's `replicate()` without transfers.  The simulated driver
copies in the call, so enqueuing costs less on a GPU.
"""

import importlib
import statistics
import sys
import time

import paceline
import torch
from paceline._dp import gradients, segments
from paceline._dp.engine import Engine
from support import devices, fake_gpus
from torch import nn

CALLS = "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyPeerAsync", "cuLaunchKernel"
N_STEPS, N_WARM = 30, 4


def transformer():
    layer = nn.TransformerEncoderLayer(16, 4, 64, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 12), torch.randn(16, 4, 16)


def convolutions():
    parts = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(50)]
    return nn.Sequential(*[p for pair in parts for p in pair]), torch.randn(16, 4, 8, 8)


def timed(node, total):
    old = node.backward

    def backward(*args):
        begin = time.thread_time()
        result = old(*args)
        total.append(time.thread_time() - begin)
        return result

    node.backward = staticmethod(backward)


def of_torch(module, n):
    """Return the milliseconds of torch's replicate(), whose copies are views here."""
    own = importlib.import_module("torch.nn.parallel.replicate")
    own._broadcast_coalesced_reshape = lambda tensors, devices, detach=False: [
        [t.view_as(t) for t in tensors] for _ in devices
    ]
    own._get_device_index = lambda device, *_: device
    module = module.cpu()
    times = []
    for _ in range(N_STEPS):
        begin = time.thread_time()
        own.replicate(module, list(range(n)))
        times.append(time.thread_time() - begin)
    return 1e3 * statistics.median(times)


def main(n):
    torch.set_num_threads(1)
    devices.load()
    nodes, started, run = [], [], Engine._run
    for node in (gradients._Replica, gradients._Segment):
        timed(node, nodes)
    Engine._run = lambda *a: started.append(time.thread_time()) or run(*a)
    for build in (transformer, convolutions):
        (module, x), rows = build(), []
        segments.SEGMENT_BYTES = sum(p.nbytes for p in module.parameters()) // 40
        with fake_gpus.several(n):
            fake = fake_gpus.ctypes.CDLL(fake_gpus.library())
            ours = paceline.DataParallel(module.to("gpu:0"), list(range(n)))
            x = x.to("gpu:0")
            for _ in range(N_WARM + N_STEPS):
                nodes.clear()
                calls = [fake.fake_count(name.encode()) for name in CALLS]
                begin = time.thread_time()
                ours(x).sum().backward()
                calls = sum(fake.fake_count(name.encode()) for name in CALLS) - sum(
                    calls
                )
                with torch.no_grad():
                    torch._foreach_add_(list(module.parameters()), 0.0)
                rows.append((started[-1] - begin, sum(nodes), calls))
            n_segments = len(ours._engine._replicated._layout.segments)
            del ours
        columns = zip(*rows[N_WARM:], strict=True)
        before, packed, calls = map(statistics.median, columns)
        theirs = of_torch(module, n)
        print(
            f"{build.__name__}, {n} devices, {n_segments} segments: {1e3 * before:.1f} "
            f"ms before replicas start (torch's replicate {theirs:.1f}), "
            f"{1e3 * packed:.1f} ms in backward's nodes, {calls:.0f} driver calls"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
