"""The models that are timed: small and large tensors, many and few of them.

Inputs are random numbers from a fixed seed: the time of a step does not depend on the
data, and the benchmark needs no data set.  Learning rates are small, so that hundreds
of steps hardly change the weights and no value becomes denormal: denormal values would
slow down all contestants, unlike in real training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class ModelSpec:
    """A model, its input on one rank, and the number of steps in a block."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    steps_per_block: int
    by_hand: bool = False  # in tests/bench: only if asked for by name


class Transformer(nn.Module):
    """Four encoder layers of width 256 over 1,000 tokens; no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        layer = nn.TransformerEncoderLayer(
            256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token, with classes in dimension 1, as the loss needs."""
        scores: Tensor = self.head(self.layers(self.embedding(tokens)))
        return scores.transpose(1, 2)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        self.past: nn.Module = nn.Identity()
        if stride != 1 or n_in != n_out:
            self.past = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """One residual step."""
        return F.relu(self.body(x) + self.past(x))


def build_mlp(*widths: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build_resnet18(width: int = 64) -> nn.Module:
    """ResNet-18 in its form for images of 32 x 32 pixels."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    widths = [width * factor for factor in (1, 1, 1, 2, 2, 4, 4, 8, 8)]
    for n_in, n_out in pairwise(widths):
        layers.append(ResidualBlock(n_in, n_out, 1 if n_in == n_out else 2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)]
    return nn.Sequential(*layers)


def classes(*shape: int, n_classes: int) -> Callable[[torch.Generator], Batch]:
    """Make batches of random inputs, the first axis counting samples, with labels."""
    return lambda g: (
        torch.randn(shape, generator=g),
        torch.randint(n_classes, shape[:1], generator=g),
    )


def regression(*shape: int) -> Callable[[torch.Generator], Batch]:
    """Make batches of random inputs with targets of the same shape."""
    return lambda g: (torch.randn(shape, generator=g), torch.randn(shape, generator=g))


def tokens(n_samples: int, length: int) -> Callable[[torch.Generator], Batch]:
    """Make batches of random tokens with the token that follows each."""
    return lambda g: (
        torch.randint(1000, (n_samples, length), generator=g),
        torch.randint(1000, (n_samples, length), generator=g),
    )


ALL = [
    ModelSpec(
        "digits",
        "digits MLP, 0.2M",
        lambda: build_mlp(64, 416, 416, 10),
        classes(64, 64, n_classes=10),
        F.cross_entropy,
        steps_per_block=60,
    ),
    ModelSpec(
        "transformer",
        "transformer, 4 layers, d=256, 3.7M",
        Transformer,
        tokens(8, 32),
        F.cross_entropy,
        steps_per_block=10,
    ),
    ModelSpec(
        "resnet18",
        "ResNet-18 for 32 x 32, 11M",
        build_resnet18,
        classes(4, 3, 32, 32, n_classes=10),
        F.cross_entropy,
        steps_per_block=6,
    ),
    ModelSpec(
        "mlp25m",
        "MLP 25M, 6 x 16 MiB",
        lambda: build_mlp(*[2048] * 7),
        regression(32, 2048),
        F.mse_loss,
        steps_per_block=6,
    ),
]
BY_NAME = {spec.name: spec for spec in ALL}
