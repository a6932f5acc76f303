"""What the tests of replicas that are threads share."""

import threading

import torch
from paceline._dp import effects
from torch import nn

ROWS = torch.arange(8.0).reshape(4, 2)


class Call(nn.Module):
    """Runs a function as its forward."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args):
        return self.call(self, *args)


class Nothing(dict):
    """Says of every forward that it is known to draw and to write nothing."""

    def get(self, key, default=None):
        return self.setdefault(key, effects.Record(False, set()))


def integers(module):
    """Give a module parameters that are small integers, so that sums are exact."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_((torch.arange(p.numel()).reshape(p.shape) + i) % 5 - 2)
    return module


def where(module, x):
    return torch.full((len(x),), threading.get_ident(), device="cpu")
