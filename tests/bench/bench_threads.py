"""Replicas in parallel against one after the other, with and without the GIL.

    PYTHON_GIL=0 PYTHONPATH=tests python3.14t tests/bench/bench_threads.py

Host time of the forwards, on devices of the CPU with kernels of a few microseconds.
The controls are plain threads without Paceline: what keeps the ratio from 2 there is
the machine and the interpreter.
"""

import statistics
import sys
import threading
import time
from unittest import mock

import dp_models
import paceline
import torch
from paceline._dp.engine import Engine, _run_or_wait
from support import devices, fake_gpus
from torch import nn
from torch.nn import functional

N_ROUNDS, N_WARM = 150, 10


def transformer():
    layer = nn.TransformerEncoderLayer(16, 4, 64, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()


def gru_step():
    """Return a step of a model that calls a GRU cell in a loop."""
    spec = dp_models.BY_NAME["gru-cells"]
    net, (x, y) = spec.build(), spec.make_batch(torch.Generator().manual_seed(0))
    return lambda: functional.cross_entropy(net(x), y).backward()


def loop():
    return sum(i & 3 for i in range(60_000))


def seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def show(name, parallel, in_turn):
    ratios = [b / a for a, b in zip(parallel, in_turn, strict=True)][N_WARM:]
    low, middle, high = statistics.quantiles(ratios, n=4)
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"{name}, GIL {gil}: in turn / parallel {middle:.2f} [{low:.2f}, {high:.2f}]")


def control(name, one, other):
    """Time plain threads: the other call runs on a thread that waits for it."""
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    def serve():
        for _ in range(N_ROUNDS):
            go.acquire()
            other()
            done.release()

    def both():
        go.release()
        one()
        done.acquire()

    thread = threading.Thread(target=serve)
    thread.start()
    rounds = range(N_ROUNDS)
    times = [(seconds(both), seconds(lambda: (one(), other()))) for _ in rounds]
    thread.join()
    show(name, *zip(*times, strict=True))


def replicas(n):
    parallel, in_turn = [], []

    def run(self, parts, copies, tasks, arguments):
        outputs = []

        def together():
            outputs[:] = self._run_side_by_side(tasks)[0]

        def alone():
            outputs[:] = list(map(_run_or_wait, tasks))

        if len(parallel) == len(in_turn):
            parallel.append(seconds(together))
        else:
            in_turn.append(seconds(alone))
        return outputs

    with fake_gpus.several(n):
        model = paceline.DataParallel(transformer().to("gpu:0"), range(n))
        x = torch.randn(4 * n, 4, 16).to("gpu:0")
        model(x)
        with mock.patch.object(Engine, "_run", run):
            for _ in range(2 * N_ROUNDS):
                model(x)
        del model
    in_ms = statistics.median(parallel[N_WARM:]) * 1e3
    show(f"{n} replicas, {in_ms:.1f} ms", parallel, in_turn)


if __name__ == "__main__":
    torch.set_num_threads(1)
    devices.load()
    one, other, x = transformer(), transformer(), torch.randn(4, 4, 16)
    control("control: loops of Python", loop, loop)
    control("control: two modules", lambda: one(x), lambda: other(x))
    control("control: two steps of GRU cells", gru_step(), gru_step())
    for n in (2, 4):
        replicas(n)
