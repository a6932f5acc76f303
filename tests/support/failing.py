"""Backwards that fail."""

import torch


class FailsInBackward(torch.autograd.Function):
    """Hands its input on; its backward raises the error that it was given.

    Give a class where nothing may stay: an object keeps its traceback.
    """

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error
