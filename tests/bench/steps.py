"""Time whole training steps of contestants in one group of processes.

A step is zero_grad() with its default, forward, loss, backward, and SGD without
momentum.  This is the whole cost in a training loop, so it includes work that a
contestant moves out of backward.

How the contestants are made equal
----------------------------------
- Each has a separate model in the same process, with the same seed and inputs.
- They take turns in blocks of a few steps, in a new random order for each round, which
  is the same on all ranks.  A block begins with a barrier and a few untimed steps, as
  another contestant has just used the caches and the heap.
- After a block, zero_grad() drops gradients, for all contestants.
- `none` has no barrier between its steps: it is the cost of computing alone.  All
  ranks still run it at the same time, and so share memory bandwidth and caches as the
  others do, and can drift apart only within a block.  A busy machine favours `none`: a
  rank that is disturbed delays no other rank, while a step with communication takes as
  long as its slowest rank.  Ratios to `none` are therefore upper bounds.
- The garbage collector runs as it does for users.

With --apart, ratios to `none` are not bounds: its heap differs, and it may have more
page faults than the others.  `bench_ddp.py` describes the questions of both ways.

Every figure is a mean over the ranks.  Wall time is measured for each step.  The clock
of a single rank would favour contestants that communicate.  If a rank wakes up late,
its peers are ahead, and it need not wait in the next step.  So its steps are long and
short in turn, and the short ones would determine the 10th percentile.  CPU time (user
and system, of all threads of a process, including those of a communication library),
system time and minor page faults are measured per block and divided by its steps.
Kernels may split CPU time into user and system by samples every few ms: the system time
of a short block is rough, and only a mean over many blocks is useful.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_models as models
import contestants
import torch
import torch.distributed as dist
from bench_models import Batch, ModelSpec
from groups import Job
from torch import Tensor, nn

MODEL_SEED = 1
N_BATCHES = 4
N_CHECKED_STEPS = 3
MEMORY_STEPS = 5

# Relative to the largest element of a gradient.  Two ranks give the same bits.  With
# more, the order of summation may differ, by some units in the last place (6e-8).
TOLERANCE = 1e-5


@dataclass
class Entry:
    """A running contestant: its model, its optimizer and its figures."""

    name: str
    spec: ModelSpec
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    step_ns: list[int] = field(default_factory=list)  # one per step
    cpu_ns: list[float] = field(default_factory=list)  # per block: a step's mean
    system_s: list[float] = field(default_factory=list)  # as cpu_ns, in the kernel
    faults: list[float] = field(default_factory=list)  # per block: a step's mean

    def __post_init__(self) -> None:
        torch.manual_seed(MODEL_SEED)
        self.model = contestants.WRAP[self.name](self.spec.build())
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=models.LEARNING_RATE
        )

    def backward(self, batch: Batch) -> None:
        inputs, targets = batch
        self.optimizer.zero_grad()
        self.spec.loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    def step(self, batch: Batch) -> None:
        self.backward(batch)
        self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        found = [p.grad for p in self.model.parameters()]
        missing = sum(g is None for g in found)
        if missing:
            raise AssertionError(f"{self.name}: {missing} parameters have no gradient")
        return [g for g in found if g is not None]

    def follow(self, other: Entry) -> None:
        with torch.no_grad():
            pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
            for ours, theirs in pairs:
                ours.copy_(theirs)

    def time_block(self, batches: list[Batch], settle: int, n_steps: int) -> None:
        dist.barrier()
        for i in range(settle):
            self.step(batches[i % N_BATCHES])
        before = resource.getrusage(resource.RUSAGE_SELF)
        cpu_ns = time.process_time_ns()
        for i in range(n_steps):
            batch = batches[i % N_BATCHES]
            begin_ns = time.perf_counter_ns()
            self.step(batch)
            self.step_ns.append(time.perf_counter_ns() - begin_ns)
        self.cpu_ns.append((time.process_time_ns() - cpu_ns) / n_steps)
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.system_s.append((after.ru_stime - before.ru_stime) / n_steps)
        self.faults.append((after.ru_minflt - before.ru_minflt) / n_steps)
        self.optimizer.zero_grad()


def make_batches(spec: ModelSpec) -> list[Batch]:
    """Return this rank's inputs, which differ by rank, so that averaging matters."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [spec.make_batch(generator) for _ in range(N_BATCHES)]


def check_gradients(
    spec: ModelSpec, entries: list[Entry], batches: list[Batch]
) -> dict[str, float]:
    """Compare all contestants' gradients with an average made by hand.

    Several steps are checked, since the first is special in most implementations.  Each
    begins from the same parameters: a batch norm over few samples would amplify a
    difference in the last place from the previous step.
    Return the largest difference of each contestant, relative to the largest element of
    the gradient, over all ranks; raise if it is too large.
    """
    bare = Entry(contestants.FLOOR, spec)
    communicating = [e for e in entries if e.name != contestants.FLOOR]
    largest = dict.fromkeys([e.name for e in communicating], 0.0)
    for batch in batches[:N_CHECKED_STEPS]:
        bare.backward(batch)
        for gradient in bare.gradients():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        for entry in communicating:
            entry.backward(batch)
            pairs = zip(entry.gradients(), bare.gradients(), strict=True)
            for ours, right in pairs:
                scale = right.abs().max().clamp_min(torch.finfo(right.dtype).tiny)
                difference = ((ours - right).abs().max() / scale).item()
                # max() would lose a NaN
                if not difference <= largest[entry.name]:
                    largest[entry.name] = difference
            entry.optimizer.step()
        bare.optimizer.step()
        for entry in communicating:
            entry.follow(bare)
    for name in largest:
        worst = torch.tensor(largest[name])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        largest[name] = worst.item()
        if not largest[name] <= TOLERANCE:
            raise AssertionError(
                f"{name}: gradients are wrong by {largest[name]:g} of their largest "
                f"element, more than {TOLERANCE:g}: not timed"
            )
    for entry in communicating:
        entry.optimizer.zero_grad()
    return largest


def time_in_turns(job: Job) -> dict[str, Any]:
    spec = models.BY_NAME[job.model]
    batches = make_batches(spec)
    entries = [Entry(name, spec) for name in job.contestants]
    differences = check_gradients(spec, entries, batches)
    time_blocks(job, entries, batches)
    return {"gradient_difference": differences, **figures_of(entries)}


def time_alone(job: Job) -> dict[str, Any]:
    """Time one contestant; no other has used the heap of these processes."""
    spec = models.BY_NAME[job.model]
    batches = make_batches(spec)
    [name] = job.contestants
    entry = Entry(name, spec)
    for batch in batches[:N_CHECKED_STEPS]:  # in other modes the check does these
        entry.step(batch)
    time_blocks(job, [entry], batches)
    return figures_of([entry])


def check_alone(job: Job) -> dict[str, Any]:
    spec = models.BY_NAME[job.model]
    entries = [Entry(name, spec) for name in job.contestants]
    differences = check_gradients(spec, entries, make_batches(spec))
    return {"gradient_difference": differences}


def time_blocks(job: Job, entries: list[Entry], batches: list[Batch]) -> None:
    n_steps = job.steps_per_block or models.BY_NAME[job.model].steps_per_block
    order = random.Random(job.order_seed)
    for _ in range(job.blocks):
        for entry in order.sample(entries, len(entries)):
            entry.time_block(batches, job.settle_steps, n_steps)


def over_ranks(values: Sequence[float]) -> list[float]:
    """Return the mean over ranks of each figure; all ranks call this."""
    mean = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mean)
    return [round(value, 1) for value in (mean / dist.get_world_size()).tolist()]


def figures_of(entries: list[Entry]) -> dict[str, Any]:
    parameters = list(entries[0].model.parameters())
    return {
        "n_parameters": sum(p.numel() for p in parameters),
        "n_tensors": len(parameters),
        "contestants": {
            entry.name: {
                "step_us": over_ranks([ns / 1e3 for ns in entry.step_ns]),
                "cpu_us": over_ranks([ns / 1e3 for ns in entry.cpu_ns]),
                "system_us": over_ranks([s * 1e6 for s in entry.system_s]),
                "faults": over_ranks(entry.faults),
            }
            for entry in entries
        },
    }


def pss_mib() -> float:
    """Return this process's memory while all ranks are at the same point.

    A page that n processes share counts as 1/n page: the resident set would count
    shared buckets in full for every rank.
    """
    dist.barrier()
    text = Path("/proc/self/smaps_rollup").read_text()
    dist.barrier()
    return int(text.partition("\nPss:")[2].split()[0]) / 1024


def measure_memory(job: Job) -> dict[str, Any]:
    """Return the memory of rank 0, with only one contestant in the processes."""
    spec = models.BY_NAME[job.model]
    batches = make_batches(spec)
    before = pss_mib()
    entry = Entry(job.contestants[0], spec)
    for i in range(MEMORY_STEPS):
        entry.step(batches[i % N_BATCHES])
    entry.backward(batches[0])
    after_backward = pss_mib()
    entry.optimizer.zero_grad()
    return {
        "pss_before_mib": before,
        "pss_after_backward_mib": after_backward,
        "pss_after_zero_grad_mib": pss_mib(),
    }
