"""Hooks of parameters where the loss leaves out some of the module's outputs."""

import pytest
import torch
from replicas import Twin, integer_weights, integers, loss_of
from torch import nn


class Heads(nn.Module):
    """Two outputs, each of weights of its own."""

    def __init__(self):
        super().__init__()
        self.body = integer_weights(nn.Linear(3, 4), 1)
        self.left = integer_weights(nn.Linear(4, 2), 2)
        self.right = integer_weights(nn.Linear(4, 2), 3)

    def forward(self, x):
        hidden = self.body(x)
        return self.left(hidden), self.right(hidden)


@pytest.mark.parametrize("create_graph", [False, True], ids=["first", "recorded"])
def test_hooks_get_a_tensor_where_the_loss_leaves_out_an_output(wrap, create_graph):
    twin = Twin(wrap, Heads())
    for model in (twin.plain, twin.inner):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * 2)
    grads = []
    for model, inner in ((twin.plain, twin.plain), (twin.ours, twin.inner)):
        loss = loss_of(model(integers(7, 3))[0])
        some = [*inner.body.parameters(), *inner.left.parameters()]
        grads.append(torch.autograd.grad(loss, some, create_graph=create_graph))
        loss = loss_of(model(integers(7, 3))[0])
        loss.backward()
        grads[-1] += tuple(p.grad for p in some)
        idle = [p.grad for p in inner.right.parameters()]
        assert all(grad is None or not grad.any() for grad in idle)
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)
