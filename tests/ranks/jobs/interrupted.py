"""Interrupt steps of DataParallel at many moments; check each next step.

Arguments: the number of interrupts, and the seed for their moments.
"""

import copy
import os
import random
import signal
import sys

import torch
from paceline import DataParallel
from torch import nn

ROWS = (7, 6, 1)
LONGEST_SECONDS = 4e-3  # about a step and a half


class Net(nn.Module):
    """Attributes select the operations of its forward and the form of its output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.register_buffer("shift", torch.zeros(1))
        self.scale, self.form = 1, "tensor"

    def forward(self, x):
        out = self.layers(x) * self.scale + self.shift
        return {"tensor": out, "tuple": (out,), "dict": {"out": out}}[self.form]


def loss_of(out):
    while not isinstance(out, torch.Tensor):
        (out,) = out.values() if isinstance(out, dict) else out
    return (out * torch.arange(1.0, out.numel() + 1).reshape(out.shape)).sum()


def change(module, draw):
    module.scale = draw.randrange(1, 4)
    module.form = draw.choice(("tensor", "tuple", "dict"))
    if draw.random() < 0.3:
        module.shift.fill_(draw.randrange(3))


def run_interrupted(model, module, draw):
    """Take three steps; return whether Ctrl-C interrupted them."""
    try:
        try:
            delay = draw.uniform(1e-5, LONGEST_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, delay)
            for _ in range(3):
                change(module, draw)
                loss_of(model(batch(draw))).backward()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        torch.set_grad_enabled(True)  # an interrupt may leave torch's no_grad() on
        return True
    return False


def batch(draw):
    return torch.randint(-3, 4, (draw.choice(ROWS), 64)).double()


def check_step(model, module, plain, draw):
    """Compare a step's bits with those of the plain module: values are integers."""
    for name in ("scale", "form"):
        setattr(plain, name, getattr(module, name))
    plain.shift.copy_(module.shift)
    for one in (module, plain):
        one.zero_grad()
    x = batch(draw)
    outs = [model(x), plain(x)]
    assert type(outs[0]) is type(outs[1]), module.form
    for out in outs:
        loss_of(out).backward()
    assert torch.equal(*map(loss_of, outs))
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def main(n_interrupts, seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    module = Net().double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randint(-2, 3, p.shape))
    plain = copy.deepcopy(module)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    model = DataParallel(module, ["cpu", "cpu"])
    check_step(model, module, plain, draw)
    n = 0
    while n < n_interrupts:
        n += run_interrupted(model, module, draw)
        check_step(model, module, plain, draw)
    print(f"right after each of {n} interrupts")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
