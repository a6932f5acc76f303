"""An autograd function whose backward fails."""

import torch


class FailsInBackward(torch.autograd.Function):
    """Returns its input; its backward raises the given error.

    If a test checks for leaks, give a class: an error object keeps its traceback.
    """

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error
