"""One rank of one group: joins the others, does its job, leaves the figures of rank 0.

Run by `groups.py` as `python rank.py FOLDER RANK`; FOLDER holds `job.json`.  Each rank
ends itself, with a traceback of all threads, when the job's time is over, so that
nothing can hang for ever, not even when the parent is gone.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from job import Job
from paceline._cli.bench.all_reduce import time_all_reduce
from steps import check_alone, measure_memory, time_alone, time_in_turns

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.namespaces import INTERFACE, enter


def time_calls(job: Job) -> dict[str, Any]:
    """Time the bare all-reduce by size."""
    times_us = time_all_reduce(
        job.contestants,
        job.sizes_bytes,
        job.blocks,
        job.settle_steps,
        job.order_seed,
    )
    return {"times_us": times_us}


TASKS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "steps": time_in_turns,
    "steps_apart": time_alone,
    "check": check_alone,
    "memory": measure_memory,
    "all_reduce": time_calls,
}


def main() -> None:
    """Join, work, report, leave."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = Job.load(folder / "job.json")
    faulthandler.dump_traceback_later(job.limit_seconds, exit=True)
    torch.set_num_threads(1)
    if job.namespaces:
        enter(job.namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=job.ranks,
        timeout=datetime.timedelta(seconds=job.limit_seconds),
    )
    figures = TASKS[job.task](job)
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads outlive the group and can end a process with SIGABRT while the
    # interpreter is taken down.  Nothing is left to do: leave without that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
