"""torch and Gloo alone tear the heap: python tests/parity/ddp/gloo_alone.py [seconds].

Two processes all-reduce sparse tensors while they all-reduce dense ones, and gather
bytes in between, as a step and a construction do.  Nothing of Paceline is imported.  On
two cores with a load of 100, 3 of some 60 runs of 90 s died (torch 2.13): malloc found
an unaligned chunk, in Gloo's sparse all-reduce or in its TCP loop.  So a rank of
test_sparse.py may die by torch's class.  With parts of this alone no run died.
"""

import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

SHOWS_STACKS = Path(__file__).parents[3] / "build/crash.so"


def run_rank(rank, path, seconds):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2
    )
    until = time.monotonic() + seconds
    for turn in range(10**9):
        if turn % 500 == 0:
            group = dist.new_group()
            goes_on = torch.tensor(int(time.monotonic() < until))
            dist.all_reduce(goes_on, dist.ReduceOp.MIN, group=group)
            if not goes_on:
                break
        rows = torch.randint(0, 20, (1, 12)), torch.randn(12, 6)
        sparse = torch.sparse_coo_tensor(*rows, (20, 6), check_invariants=False)
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for tensor in (torch.randn(18), sparse)
        ]
        for work in reversed(works):
            work.wait()
        for n_bytes in (1, 600):
            mine = torch.zeros(n_bytes, dtype=torch.uint8)
            theirs = [torch.empty_like(mine) for _ in range(2)]
            work = dist.all_gather(theirs, mine, group=group, async_op=True)
            while not work.is_completed():
                time.sleep(0.0001)
    print(f"rank {rank}: {turn} turns", flush=True)
    os._exit(0)


if __name__ == "__main__":
    if SHOWS_STACKS.exists():
        ctypes.CDLL(str(SHOWS_STACKS))
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 90.0
    path = tempfile.mktemp()
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, path, seconds)
        children.append(pid)
    ends = [os.waitpid(pid, 0)[1] for pid in children]
    print(f"the ranks ended with {ends}")
    sys.exit(any(ends))
