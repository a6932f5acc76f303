"""A script that trains by worker processes, for tests of how it ends: HOW is its word.

It has no main guard, on purpose.  It prints "ready" when its workers have answered; a
replica that is at work for long prints "busy", behind its number.
"""

import os
import sys
import time

import paceline
import torch
from torch import nn

SPINS, NAPS, RAISES = 101, 102, 103
NAP_SECONDS = 1.5
how = sys.argv[1]


class Net(nn.Module):
    """A layer; what the first number of the second half says, replica 1 does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        order = int(x[0, 0]) if "PACELINE_WORKER" in os.environ else 0
        if order > 100:
            print("busy", flush=True)
        if order == SPINS:
            while True:
                x = x + 1
        elif order == NAPS:
            time.sleep(NAP_SECONDS)
        elif order == RAISES:
            raise ValueError("on purpose")
        return self.layer(x)


def batch(order=1):
    x = torch.ones(4, 2)
    x[2:, 0] = order
    return x


torch.manual_seed(0)
model = paceline.DataParallel(Net(), ["cpu", "cpu"], engine="process")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = (model(batch()) - 3).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[0] > losses[1] > losses[2]
if how == "with loaders":
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        """Has its last items after ten minutes."""

        def __len__(self):
            return 16

        def __getitem__(self, index):
            if index >= 8:
                time.sleep(600)
            return torch.ones(2)

    loader = DataLoader(
        Slow(),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    model(next(batches)).sum().backward()
if how != "caught":
    print("ready", flush=True)
if how == "ends":
    pass
elif how == "closes":
    model.close()
elif how == "raises":
    raise ValueError("on purpose")
elif how == "exits":
    sys.exit(3)
elif how == "raises in a replica":
    model(batch(RAISES))
elif how == "computes":
    model(batch(SPINS))
elif how == "caught":
    try:
        print("ready", flush=True)
        model(batch(NAPS))
    except KeyboardInterrupt:
        model(batch()).sum().backward()
        print("goes on", flush=True)
else:
    time.sleep(600)
