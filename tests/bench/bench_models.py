"""The models of `paceline bench`, and models that only the tests time."""

import torch
from paceline._cli.bench.models import (
    ALL as OF_COMMAND,
)
from paceline._cli.bench.models import (
    LEARNING_RATE,
    Batch,
    ModelSpec,
    Transformer,
    build_mlp,
    build_resnet18,
    regression,
    tokens,
)
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LEARNING_RATE", "Batch", "Transformer", "build_resnet18", "tokens"]


class ManySmall(nn.Module):
    """A thousand parameters of four elements: shows the cost per parameter."""

    def __init__(self, n: int = 1000) -> None:
        super().__init__()
        self.terms = nn.ParameterList(torch.randn(4) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        """Return a sum of products, so that each gradient is a separate tensor."""
        total = torch.zeros_like(x)
        for term in self.terms:
            total = torch.addcmul(total, term, x)
        return total


ALL = [
    *OF_COMMAND,
    ModelSpec(
        "small",
        "1000 parameters of 4 elements",
        ManySmall,
        regression(4),
        F.mse_loss,
        steps_per_block=12,
    ),
    ModelSpec(
        "mlp100m",
        "MLP 100M, 6 x 64 MiB",
        lambda: build_mlp(*[4096] * 7),
        regression(32, 4096),
        F.mse_loss,
        steps_per_block=4,
        by_hand=True,
    ),
]
BY_NAME = {spec.name: spec for spec in ALL}
