"""A job in which one rank fails or leaves; test_exceptions.py uses its model too.

    python failing.py LAUNCH WHERE FOLDER [RANK]

With LAUNCH `script`, this process is one rank; with `spawn`, `fork` or `forkserver`, it
starts the ranks.  Every rank that raises a PeerError writes its message to
FOLDER/error.RANK.
"""

import json
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from paceline import DistributedDataParallel, PeerError

N_RANKS = 3
CULPRIT = 1
BAD_STEP = 2
N_STEPS = 5


def explode_as_asked():
    raise ValueError("these are the culprit's own words")


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, explode):
        ctx.explode = explode
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.explode()


class Net(torch.nn.Module):
    explode = staticmethod(explode_as_asked)

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 128)
        self.middle = torch.nn.Linear(128, 128)  # its gradient is a view
        self.last = torch.nn.Linear(128, 1)
        self.where = None

    def forward(self, x):
        hidden = self.bomb(torch.relu(self.first(x)), "late")
        if self.where == "hook":
            hidden.register_hook(lambda _: self.explode())
        hidden = self.middle(hidden)
        if self.where == "forward":
            self.explode()
        return self.last(self.bomb(hidden, "middle"))

    def bomb(self, x, where):
        return Bomb.apply(x, self.explode) if self.where == where else x


def run(rank, where, folder):
    global model  # as in many scripts, it lives until the process ends
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", N_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=N_RANKS)
    model = DistributedDataParallel(Net())
    try:
        for step in range(N_STEPS):
            if rank == CULPRIT and step == BAD_STEP:
                if where == "leave":
                    return
                if where == "outside":
                    explode_as_asked()
                model.module.where = where
            model(torch.randn(4, 8)).sum().backward()
    except PeerError as error:
        words = {"kind": type(error).__name__, "words": str(error), "step": step}
        error = pickle.loads(pickle.dumps(error))
        words["facts"] = error.rank, error.step, error.signal
        Path(folder, f"error.{rank}").write_text(json.dumps(words))


def start(launch, where, folder):
    if launch == "spawn":
        context = mp.spawn(run, (where, folder), nprocs=N_RANKS, join=False)
        processes = context.processes  # join() would end all when the first one fails
    else:
        kind = mp.get_context(launch)
        processes = [
            kind.Process(target=run, args=(r, where, folder)) for r in range(3)
        ]
        for process in processes:
            process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


if __name__ == "__main__":
    launch, where, folder = sys.argv[1:4]
    if launch == "script":
        run(int(sys.argv[4]), where, folder)
    else:
        print(json.dumps(start(launch, where, folder)))
