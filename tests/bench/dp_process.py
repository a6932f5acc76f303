"""One process of one contestant: waits for an order, does it, answers, waits again.

Run by `dp_players.py` as `python dp_process.py FD CORE`; orders and answers travel as
dicts over the socket FD.  Between orders it is blocked in recv(), as are its peers and
workers, so that a contestant who is not at work takes nothing from the others.  When
the parent is gone, recv() ends and so does the process.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import processes

if __name__ == "__main__" and sys.argv[2] != "-":
    processes.pin(int(sys.argv[2]))  # before torch counts the cores

import dp_contestants
import dp_models
import torch
import torch.distributed as dist
from paceline._cli.bench import models
from paceline._cli.bench.models import Batch
from steps import MODEL_SEED, N_BATCHES, N_CHECKED_STEPS, TOLERANCE
from torch import nn

Figures = dict[str, Any]


class Player:
    """A wrapped model at work."""

    def __init__(self, contestant: str, model: str, rank: int, store: str) -> None:
        self.contestant = dp_contestants.BY_NAME[contestant]
        self.spec = dp_models.EVERY[model]
        n_ranks = self.contestant.ranks
        if n_ranks > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks
            )
        generator = torch.Generator().manual_seed(100)
        self.whole = [self.spec.make_batch(generator) for _ in range(N_BATCHES)]
        self.batches = [shares(batch, n_ranks)[rank] for batch in self.whole]

    def build(self) -> Figures:
        """Make the model as everybody does, and time what the wrapper adds.

        The start is construction and the first forward, less a plain forward; a forward
        before it has already made what torch makes once.
        """
        torch.manual_seed(MODEL_SEED)
        self.bare = self.spec.build()
        inputs = self.batches[0][0]
        self.bare(inputs)
        begin = time.perf_counter()
        self.bare(inputs)
        plain_s = time.perf_counter() - begin
        begin = time.perf_counter()
        self.model = self.contestant.wrap(self.bare)
        self.model(inputs)
        wrapped_s = time.perf_counter() - begin
        self.optimizer = sgd(self.model)
        parameters = list(self.model.parameters())
        return {
            "start_s": wrapped_s - plain_s,
            "threads": torch.get_num_threads(),
            "n_processes": len(processes.tree(os.getpid())),
            "n_parameters": sum(p.numel() for p in parameters),
            "n_tensors": len(parameters),
        }

    def backward(self, batch: Batch) -> None:
        """Run a step without its last part."""
        inputs, targets = batch
        self.optimizer.zero_grad()
        self.spec.loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    def step(self, batch: Batch) -> None:
        """Run a whole step: what is timed."""
        self.backward(batch)
        self.optimizer.step()

    def check(self) -> Figures:
        """Compare some steps' gradients with those of the bare module.

        It is given the parts of the batch one by one, so that BatchNorm sees what a
        replica sees.  The difference is relative to a gradient's largest element.
        """
        torch.manual_seed(MODEL_SEED)
        bare = self.spec.build()
        optimizer = sgd(bare)
        parts = self.contestant.parts
        largest = 0.0
        for whole, mine in list(zip(self.whole, self.batches, strict=True))[
            :N_CHECKED_STEPS
        ]:
            optimizer.zero_grad()
            for inputs, targets in shares(whole, parts):
                (self.spec.loss(bare(inputs), targets) / parts).backward()  # type: ignore[no-untyped-call]
            self.backward(mine)
            pairs = zip(self.model.parameters(), bare.parameters(), strict=True)
            for ours, right in pairs:
                assert ours.grad is not None
                assert right.grad is not None
                scale = right.grad.abs().max().clamp_min(torch.finfo(right.dtype).tiny)
                difference = ((ours.grad - right.grad).abs().max() / scale).item()
                if not difference <= largest:  # max() would lose a NaN
                    largest = difference
            optimizer.step()
            self.optimizer.step()
        if not largest <= TOLERANCE:
            raise AssertionError(
                f"gradients are wrong by {largest:g} of their largest element, "
                f"more than {TOLERANCE:g}: not timed"
            )
        self.optimizer.zero_grad()
        return {"difference": largest}

    def block(self, settle: int, n_steps: int) -> Figures:
        """Take one turn: some untimed steps, then `n_steps` timed ones."""
        pids = processes.tree(os.getpid())
        if self.contestant.ranks > 1:
            dist.barrier()
        for i in range(settle):
            self.step(self.batches[i % N_BATCHES])
        step_ns = []
        cpu_ns = processes.cpu_ns(pids)
        for i in range(n_steps):
            batch = self.batches[i % N_BATCHES]
            begin_ns = time.perf_counter_ns()
            self.step(batch)
            step_ns.append(time.perf_counter_ns() - begin_ns)
        cpu_ns = processes.cpu_ns(pids) - cpu_ns
        self.optimizer.zero_grad()
        return {
            "step_us": [ns / 1e3 for ns in step_ns],
            "cpu_us": cpu_ns / n_steps / 1e3,
        }

    def forward(self) -> Figures:
        """Stand where a model is that has been used and not been trained."""
        with torch.no_grad():
            self.model(self.batches[0][0])
        return {}

    def train(self, n_steps: int) -> Figures:
        """Stand after some steps and one more backward: gradients are there."""
        for i in range(n_steps):
            self.step(self.batches[i % N_BATCHES])
        self.backward(self.batches[0])
        return {}

    def leave(self) -> Figures:
        """End what the wrapper has started."""
        close = getattr(self.model, "close", None)
        if close is not None:
            close()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return {"n_processes": len(processes.tree(os.getpid()))}


def shares(batch: Batch, n: int) -> list[Batch]:
    """Divide a batch by samples."""
    inputs, targets = batch
    return list(zip(inputs.chunk(n), targets.chunk(n), strict=True))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of all contestants."""
    return torch.optim.SGD(model.parameters(), lr=models.LEARNING_RATE)


def main() -> None:
    """Do what is asked until the parent has had enough."""
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    player = Player(**pipe.recv())
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            break
        pipe.send(getattr(player, order.pop("do"))(**order))
    # Gloo's threads outlive the group and can end a process with SIGABRT while the
    # interpreter is taken down.  Nothing is left to do: leave without that.
    os._exit(0)


if __name__ == "__main__":
    main()
