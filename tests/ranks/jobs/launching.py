"""A script that launches ranks, on purpose without a main guard: launching.py HOW.

Each rank prints its process id.
"""

import atexit
import itertools
import os
import subprocess
import sys
import threading
import time

import paceline
import torch
import torch.distributed as dist
from paceline._launch import processes
from support import forbidden
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
    if how == "stops":
        stop = "kill -STOP $PPID; " * dist.get_rank()
        subprocess.Popen(["sh", "-c", f"{stop}echo pid $$; exec sleep 600"])
    elif dist.get_rank() == 1:
        sum(itertools.repeat(0))  # never lets another Python thread run
    time.sleep(600)


def speak_late():
    time.sleep(0.5)
    print("threads end")


def started():
    """Return the processes of ranks that this one has started so far."""
    return [each._popen.pid for group in processes._open for each in group._processes]


if how == "is refused":  # a sandbox
    for name in ("memfd_create", "pidfd_open"):
        forbidden.forbid(name)

if how in ("starts", "forks", "becomes another", "exits"):
    threading.Thread(target=paceline.launch, args=(train, 2, 3), daemon=True).start()
    if how == "starts":  # at once, long before the ranks run
        while len(started()) < 2:
            time.sleep(0.001)
        print("pid", *started(), flush=True)
    input()  # until the test has read the ranks' processes
    if how == "exits":
        sys.exit(0)
    if how == "becomes another":
        print("becomes another", flush=True)
        os.execv(sys.executable, [sys.executable, "-c", "input()"])
    if os.fork() == 0:  # another thread may be printing meanwhile
        os.write(1, b"forked %d\n" % os.getpid())
        time.sleep(600)
    input()

try:
    print("results", paceline.launch(train, 2, 3), flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
