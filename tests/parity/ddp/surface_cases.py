"""Models for test_surface.py and test_surface_training.py."""

import torch
from torch import nn

X = torch.tensor([[1.0, 2.0]])


class Counting(nn.Module):
    """Has a buffer that each rank writes on its own."""

    def __init__(self, rank):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", torch.tensor([float(rank)]))

    def forward(self, x):
        return self.layer(x)


class Chain(nn.Module):
    """Four layers; not every torch compiles the forwards of its own containers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
