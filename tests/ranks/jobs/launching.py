"""A script that launches ranks, with no main guard, on purpose: launching.py HOW.

Each rank prints its process id, and rank 0 the one of the script besides.
"""

import atexit
import os
import signal
import sys
import threading
import time

import paceline
import torch
import torch.distributed as dist
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
    if how == "is killed" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "ends slowly":
        threading.Thread(target=speak_late).start()
        atexit.register(print, "handlers run")
        return 0.0
    time.sleep(600)


def speak_late():
    time.sleep(0.5)
    print("threads end")


try:
    print("results", paceline.launch(train, 2, 3), flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
