"""A script that launches ranks, with no main guard, on purpose: launching.py HOW.

Each rank prints its process id.
"""

import atexit
import itertools
import os
import sys
import threading
import time

import paceline
import torch
import torch.distributed as dist
from paceline._launch import processes
from torch import nn

how = sys.argv[1]
print("begins", flush=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x)


def train(n_steps):
    print("pid", os.getpid())
    dist.barrier()
    if how == "trains":
        model = paceline.DistributedDataParallel(Net())
        for _ in range(n_steps):
            model(torch.ones(2, 4)).sum().backward()
        return float(model.module.linear.bias.grad)
    if how == "ends slowly":
        threading.Thread(target=speak_late).start()
        atexit.register(print, "handlers run")
        return 0.0
    if dist.get_rank() == 1:
        sum(itertools.repeat(0))  # no other thread of Python's runs
    time.sleep(600)


def speak_late():
    time.sleep(0.5)
    print("threads end")


def started():
    """Return the ranks' processes that this one has started by now."""
    return [each._popen.pid for group in processes._open for each in group._processes]


if how in ("starts", "forks", "becomes another", "exits"):
    threading.Thread(target=paceline.launch, args=(train, 2, 3), daemon=True).start()
    if how == "starts":  # at once, long before they run
        while len(started()) < 2:
            time.sleep(0.001)
        print("pid", *started(), flush=True)
    input()  # the test has read who runs
    if how == "exits":
        sys.exit(0)
    if how == "becomes another":
        print("becomes another", flush=True)
        os.execv(sys.executable, [sys.executable, "-c", "input()"])
    if os.fork() == 0:  # and another thread may have been printing
        os.write(1, b"forked %d\n" % os.getpid())
        time.sleep(600)
    input()

try:
    print("results", paceline.launch(train, 2, 3), flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
