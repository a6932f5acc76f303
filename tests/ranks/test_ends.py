"""Processes that end as scripts do, while all of their objects are alive."""

import re
import subprocess
import sys

from support import warm

SCRIPT = """
import sys, time, torch
import torch.distributed as dist
import paceline

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
model = paceline.DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(40):
    if rank == 1:
        time.sleep(0.005)
    model(torch.ones(2, 8)).sum().backward()
    dist.broadcast(torch.tensor([1.0]), 0)
dist.destroy_process_group()
"""


def test_ranks_end_well_behind_a_collective_of_torch(tmp_path):
    for i in range(4):  # without the wait at exit, about every second one fails
        command = [sys.executable, "-c", SCRIPT]
        ranks = [
            warm.Popen(
                [*command, str(rank), str(tmp_path / f"store{i}")],
                is_whole=True,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors
        # Gloo may print something; Paceline and the interpreter must not.
        assert not re.findall(r"(?i)paceline|traceback|warning", "".join(errors)), (
            errors
        )
