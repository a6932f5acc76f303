"""A script as users have it; the import of paceline is all that is not torch's."""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from paceline import DistributedDataParallel as DDP


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(
        torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1)
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(20):
        inputs = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    # No collective of Gloo so close to the end: torch 2.13's worker thread may still
    # hold its tensors when the interpreter ends, and then aborts the process.
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
    print(f"rank {rank} of {dist.get_world_size()} is done: {digest}")
    dist.destroy_process_group()


def main_of_spawn(rank, n_ranks, port):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(n_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    main()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.multiprocessing.spawn(main_of_spawn, (2, int(sys.argv[1])), nprocs=2)
    else:
        main()
