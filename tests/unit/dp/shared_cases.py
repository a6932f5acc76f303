"""What the tests of the process engine share."""

import torch
from paceline._compat import torch_core
from torch import nn

torch_core.attach()


class Net(nn.Module):
    """Parameters and buffers of several kinds; a child with its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.frozen = nn.Parameter(torch.tensor([1.0, 1.0]), requires_grad=False)
        self.child = nn.Linear(2, 2)
        self.register_buffer("offset", torch.tensor([1.0, 1.0]))
        self.power = 1
        self.table = torch.tensor([1.0, 1.0])
        self.options = {"a": 1}
        with torch.no_grad():
            self.child.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
            self.child.bias.zero_()

    def forward(self, x):
        if self.training:
            self.offset += 1
        y = self.child(x) * self.scale + self.frozen
        return (y + self.offset) * self.table * self.power
