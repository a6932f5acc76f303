"""Train on handwritten digits, and resume after a rank or a host has died.

    torchrun --nproc-per-node 2 --max-restarts 3 tests/examples/digits_restart.py
    torchrun --nnodes 1:3 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29400 tests/examples/digits_restart.py

If a rank dies, all others raise an error within seconds and end.  torchrun starts new
ranks on the remaining hosts, which resume from the last checkpoint.  For that, the
script does three things more than others:

* it saves the state of the training: the model, the optimizer, the number of steps;
* it begins where the checkpoint ends, if there is one;
* the number of a step alone determines its samples, with any number of ranks, so losses
  continue as without the failure.

The checkpoint must be on a file system that all hosts share.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import paceline
import torch
from digits import BATCH, SEED, load_data
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--checkpoint", type=Path, default=Path("build/demo/restart.pt"))
parser.add_argument("--steps", type=int, default=300, help="default 300")
parser.add_argument("--save-every", type=int, default=20, help="steps, default 20")
parser.add_argument("--losses", type=Path, help="a file to add a line per step to")
options = parser.parse_args()


def rows_of_step(step: int, n_rows: int) -> torch.Tensor:
    """Return the samples of a step, over all ranks."""
    epoch, batch = divmod(step, n_rows // BATCH)
    shuffle = torch.Generator().manual_seed(SEED + epoch)
    return torch.randperm(n_rows, generator=shuffle)[batch * BATCH :][:BATCH]


world = paceline.init()
torch.manual_seed(SEED)
module = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()
)
module.append(nn.Linear(256, 10))
model = paceline.DistributedDataParallel(module.to(world.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train_x, train_y, *_ = (part.to(world.device) for part in load_data())

first_step = 0
if options.checkpoint.exists():
    rest = paceline.load(options.checkpoint, model=model, optimizer=optimizer)
    first_step = rest["n_steps"]
    world.print(f"going on after step {first_step}, with {world.world_size} ranks")
first_of_rank_0 = torch.tensor(first_step)
torch.distributed.broadcast(first_of_rank_0, 0)
if first_step != first_of_rank_0:
    raise SystemExit(
        f"rank {world.rank} begins at step {first_step}, rank 0 at {first_of_rank_0}: "
        f"is {options.checkpoint} on a file system that all hosts share?"
    )

options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
for step in range(first_step, options.steps):
    rows = rows_of_step(step, len(train_x)).to(world.device)
    mine = rows[world.rank :: world.world_size]
    # Ranks may have different numbers of rows: compute the mean over all rows.
    share = len(mine) * world.world_size / len(rows)
    loss = F.cross_entropy(model(train_x[mine]), train_y[mine]) * share
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean_loss = paceline.mean(loss)
    if world.is_main and options.losses is not None:
        line = {"step": step, "loss": mean_loss.item()}
        with options.losses.open("a") as losses:
            losses.write(json.dumps(line) + "\n")
    if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
        state = {"model": model, "optimizer": optimizer, "n_steps": step + 1}
        paceline.save(state, options.checkpoint)  # rank 0 writes a whole file or none

world.print(f"{options.steps} steps are done")
torch.distributed.destroy_process_group()
