"""Two replicas in parallel against one after the other, with and without the GIL.

    PYTHON_GIL=0 PYTHONPATH=tests python3.14t tests/bench/bench_threads.py

Host time of the forwards, on devices of the CPU with kernels of a few microseconds.
The controls are plain threads without Paceline: what keeps the ratio from 2 there is
the machine and the interpreter.
"""

import statistics
import sys
import threading
import time

import paceline
import torch
from paceline._dp.engine import Engine
from support import devices, fake_gpus
from torch import nn

N_ROUNDS, N_WARM = 150, 10


def transformer():
    layer = nn.TransformerEncoderLayer(16, 4, 64, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()


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
    go, done, parallel, in_turn = *[threading.Semaphore(0) for _ in "12"], [], []

    def both():
        go.release()
        one()
        done.acquire()

    def serve():
        for _ in range(N_ROUNDS):
            go.acquire()
            other()
            done.release()

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(N_ROUNDS):
        parallel.append(seconds(both))
        in_turn.append(seconds(lambda: (one(), other())))
    thread.join()
    show(name, parallel, in_turn)


def replicas():
    found = {True: [], False: []}

    def run(self, parts, copies, tasks, arguments):
        is_parallel = len(found[True]) == len(found[False])
        outputs = []

        def call():
            if is_parallel:
                outputs.extend(self._run_side_by_side(tasks)[0])
            else:
                outputs.extend(task.run_and_take() for task in tasks)

        found[is_parallel].append(seconds(call))
        return outputs

    with fake_gpus.several(2):
        model = paceline.DataParallel(transformer().to("gpu:0"), [0, 1])
        x = torch.randn(8, 4, 16).to("gpu:0")
        model(x)
        Engine._run = run
        for _ in range(2 * N_ROUNDS):
            model(x)
        del model
    show("two replicas", found[True], found[False])


if __name__ == "__main__":
    torch.set_num_threads(1)
    devices.load()
    one, other, x = transformer(), transformer(), torch.randn(4, 4, 16)
    control("control: loops of Python", loop, loop)
    control("control: two modules", lambda: one(x), lambda: other(x))
    control("control: one module in both", lambda: one(x), lambda: one(x))
    replicas()
