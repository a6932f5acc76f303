"""Run a job in a group of fresh ranks, which `paceline.launch` starts and ends.

Every rank is a fresh interpreter with one intra-op thread and the same environment, for
all contestants.  With `malloc="keep"`, glibc keeps freed memory instead of returning it
to the kernel: then large tensors do not need new pages in each step.  When the job's
time is over, a rank ends itself, with a traceback of all threads.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paceline
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.namespaces import INTERFACE, enter

Figures = dict[str, Any]

KEEP_BYTES = (1 << 31) - 1
KEEP_TUNABLES = (
    f"glibc.malloc.mmap_threshold={KEEP_BYTES}:glibc.malloc.trim_threshold={KEEP_BYTES}"
)


@dataclass(frozen=True)
class Job:
    task: Callable[[Job], Figures]  # a function of steps.py
    ranks: int
    contestants: list[str]
    model: str
    blocks: int = 1  # turns that each contestant takes
    steps_per_block: int = 0  # timed steps of a turn; 0: the model's own number
    settle_steps: int = 2  # untimed steps before them
    order_seed: int = 0  # for the order of the contestants' turns
    limit_seconds: float = 300.0
    namespaces: list[str] = field(default_factory=list)  # by rank, if set


def prepare_environment(malloc: str) -> None:
    """Set the variables of ranks that start later: one thread, and the malloc mode."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if malloc == "keep":
        given = os.environ.get("GLIBC_TUNABLES")
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [given, KEEP_TUNABLES]))


def run_group(job: Job) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        limit = job.limit_seconds
        run = paceline.launch(
            run_rank, job.ranks, job, folder, backend="gloo", timeout=limit
        )
        return run[0]


def run_rank(job: Job, folder: str) -> Figures:
    faulthandler.dump_traceback_later(job.limit_seconds, exit=True)
    torch.set_num_threads(1)
    if job.namespaces:
        rank = dist.get_rank()
        dist.destroy_process_group()
        enter(job.namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=job.ranks,
            timeout=datetime.timedelta(seconds=job.limit_seconds),
        )
    figures = job.task(job)
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    return figures
