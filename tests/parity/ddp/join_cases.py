"""Helpers for tests of join()."""

import torch
from cases import grads_of, integer_weights, mean_over
from torch import nn
from torch.distributed.algorithms.join import Join

CONTEXTS = ["join()", "Join([])"]
FIND = {"find_unused_parameters": True}


class Wide(nn.Module):
    """A module whose gradients depend only on the input, so training is exact.

    The gradient of one parameter is large enough to become a view; three are not.
    """

    def __init__(self, has_unused=True):
        super().__init__()
        self.large = nn.Linear(100, 200)
        self.small = nn.Linear(100, 3)
        if has_unused:
            self.unused = nn.Linear(2, 2)
        integer_weights(self)

    def forward(self, x, skip=False):
        out = self.large(x).sum()
        return out if skip else out + 2 * self.small(x).sum()


def context_of(model, context, **options):
    return model.join(**options) if context == "join()" else Join([model], **options)


def train(model, ranks, context, count, step=None, **options):
    """Train inside a join context; return the gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    with context_of(model, context, **options):
        for i in range(count):
            optimizer.zero_grad()
            if step is None:
                model(ranks.integers(3, 100, key=i)).backward()
            else:
                step(model, i)
            seen.append(grads_of(model))
            optimizer.step()
    return seen


def steps_over_active(ranks, model, has):
    """Take the rank's steps; yield each, with the mean x of the ranks that take it."""
    xs = [ranks.all(ranks.integers(3, 100, key=i)) for i in range(max(has))]
    for i in range(has[ranks.rank]):
        model.zero_grad()
        model(xs[i][ranks.rank]).backward()
        yield i, mean_over([xs[i][r].sum(0) for r in range(ranks.n) if has[r] > i])
