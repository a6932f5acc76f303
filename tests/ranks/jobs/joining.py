"""A script for any launcher; test_init_launchers.py runs it.

It prints a line of JSON: the world that it joined, whether a second call returns the
same, the environment for libraries, and the gradient of its model, whose loss is the
rank times the weights.
"""

import json
import os
import sys

import paceline
import torch
import torch.distributed as dist

NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
NAMES += ["MASTER_ADDR", "MASTER_PORT"]

world = paceline.init(timeout=60)
report = {
    "rank": world.rank,
    "world_size": world.world_size,
    "local_rank": world.local_rank,
    "device": str(world.device),
    "launcher": world.launcher,
    "is_same": paceline.init() == world,
    "is_initialized": dist.is_initialized(),
    "environ": {name: os.environ[name] for name in NAMES if name in os.environ},
}
if world.rank >= 0:
    module = torch.nn.Linear(2, 1).to(world.device)
    model = paceline.DistributedDataParallel(module)
    model(torch.full((1, 2), float(world.rank))).sum().backward()
    report["grad"] = module.weight.grad.tolist()
    del model
    dist.destroy_process_group()
sys.stdout.write(json.dumps(report) + "\n")  # in a single write
