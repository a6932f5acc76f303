"""What the tests of the surface share."""

import torch
from torch import nn

X = torch.tensor([[1.0, 2.0]])


class Counting(nn.Module):
    """Has a buffer that each rank writes for itself."""

    def __init__(self, rank):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", torch.tensor([float(rank)]))

    def forward(self, x):
        return self.layer(x)


class Chain(nn.Module):
    """Four layers.  Of torch's own modules not every torch compiles the forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
