"""Host time of DataParallel on GPUs, with simulated CUDA: no GPU is timed.

    PYTHONPATH=tests python tests/bench/bench_dp_host.py [devices]

The models are 40 narrow layers in a segment; a transformer of 12 narrow layers, and a
narrow ResNet-50, with as many segments as at full width; each also with hooks on its
parameters.  Prints the CPU milliseconds of the calling thread before replicas start and
in backward's nodes, which pack and sum; the driver calls per step; and the time of
torch's `replicate()` without transfers, all without the time of simulated devices.
"""

import ctypes
import importlib
import itertools
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
FAKE = ctypes.CDLL(fake_gpus.library())
FAKE.fake_executed_ns.restype = ctypes.c_int64


def layers():
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(40)]), torch.randn(16, 16)


def transformer():
    layer = nn.TransformerEncoderLayer(16, 4, 64, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 12), torch.randn(16, 4, 16)


class Bottleneck(nn.Module):
    def __init__(self, n_in, n, stride):
        super().__init__()
        self.way = nn.Sequential(
            *(nn.Conv2d(n_in, n, 1, bias=False), nn.BatchNorm2d(n), nn.ReLU()),
            nn.Conv2d(n, n, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(n), nn.ReLU()),
            *(nn.Conv2d(n, 4 * n, 1, bias=False), nn.BatchNorm2d(4 * n)),
        )
        self.shortcut = nn.Sequential()
        if n_in != 4 * n:
            self.shortcut.append(nn.Conv2d(n_in, 4 * n, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(4 * n))

    def forward(self, x):
        return (self.way(x) + self.shortcut(x)).relu()


def resnet50():
    parts = [nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    n_in = 4
    for n, n_blocks in (4, 3), (8, 4), (16, 6), (32, 3):
        for i in range(n_blocks):
            parts.append(Bottleneck(n_in, n, 2 if i == 0 and n > 4 else 1))
            n_in = 4 * n
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 62)]
    return nn.Sequential(*parts), torch.randn(16, 3, 32, 32)


def host_time():
    """Return this thread's CPU seconds, without those of simulated devices."""
    return time.thread_time() - 1e-9 * FAKE.fake_executed_ns()


def timed(node, total):
    old = node.backward

    def backward(*args):
        begin = host_time()
        result = old(*args)
        total.append(host_time() - begin)
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
    Engine._run = lambda *a: started.append(host_time()) or run(*a)
    for build, is_hooked in itertools.product((layers, transformer, resnet50), (0, 1)):
        (module, x), rows = build(), []
        if build is not layers:
            # As small for this model as 1 MiB is for the 98 MiB of the full ResNet-50.
            segments.SEGMENT_BYTES = sum(p.nbytes for p in module.parameters()) // 98
        with fake_gpus.several(n):
            ours = paceline.DataParallel(module.to("gpu:0"), list(range(n)))
            for p in module.parameters() if is_hooked else ():
                p.register_hook(lambda grad: None)
            x = x.to("gpu:0")
            for _ in range(N_WARM + N_STEPS):
                nodes.clear()
                calls = [FAKE.fake_count(name.encode()) for name in CALLS]
                begin = host_time()
                ours(x).sum().backward()
                calls = sum(FAKE.fake_count(name.encode()) for name in CALLS) - sum(
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
            f"{build.__name__}{', hooks' * is_hooked}, {n} devices, {n_segments} "
            f"segments: {1e3 * before:.1f} "
            f"ms before replicas start (torch's replicate {theirs:.1f}), "
            f"{1e3 * packed:.1f} ms in backward's nodes, {calls:.0f} driver calls"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
