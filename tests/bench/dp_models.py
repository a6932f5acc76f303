"""The models on which DataParallel is timed: from tiny steps to long ones.

A batch is the *whole* batch, which each contestant divides in its own way.  See
`paceline._cli.bench.models` for why the inputs are random and the learning rate small.
"""

from __future__ import annotations

from paceline._cli.bench import models
from paceline._cli.bench.models import ModelSpec, classes
from torch import Tensor, nn
from torch.nn import functional as F


class LastOfLSTM(nn.Module):
    """An LSTM of width 256 over a sequence, and scores from its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of sequences."""
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


def build_cnn(n_pixels: int, *widths: int) -> nn.Module:
    """3 x 3 convolutions, each with a pooling by two, and two linear layers."""
    layers: list[nn.Module] = []
    n_in = 1
    for width in widths:
        layers += [nn.Conv2d(n_in, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        n_in = width
        n_pixels //= 2
    layers += [nn.Flatten(), nn.Linear(n_in * n_pixels**2, 128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def build_deep() -> nn.Module:
    """200 layers of width 16 and a last one: 402 parameters, no work to speak of.

    Orthogonal weights with tanh carry values and gradients through so many layers;
    with torch's own initialisation they would end as denormal numbers.
    """
    layers: list[nn.Module] = []
    for _ in range(200):
        linear = nn.Linear(16, 16)
        nn.init.orthogonal_(linear.weight)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 10))


ALL = [
    ModelSpec(
        "mlp",
        "MLP 64-256-10, batch 64",
        lambda: models.build_mlp(64, 256, 10),
        classes(64, 64, n_classes=10),
        F.cross_entropy,
        steps_per_block=300,
    ),
    ModelSpec(
        "cnn8",
        "CNN, 8 x 8 pixels, batch 64",
        lambda: build_cnn(8, 16, 32),
        classes(64, 1, 8, 8, n_classes=10),
        F.cross_entropy,
        steps_per_block=100,
    ),
    ModelSpec(
        "cnn28",
        "CNN, 28 x 28 pixels, batch 256",
        lambda: build_cnn(28, 16, 32),
        classes(256, 1, 28, 28, n_classes=10),
        F.cross_entropy,
        steps_per_block=8,
    ),
    ModelSpec(
        "transformer",
        "transformer, 4 layers, d=256, 64 tokens, batch 16",
        models.Transformer,
        models.tokens(16, 64),
        F.cross_entropy,
        steps_per_block=4,
    ),
    ModelSpec(
        "lstm",
        "LSTM 256, 50 steps, batch 32",
        LastOfLSTM,
        classes(32, 50, 64, n_classes=10),
        F.cross_entropy,
        steps_per_block=20,
    ),
    ModelSpec(
        "deep",
        "MLP of 200 tiny layers, 402 parameters, batch 64",
        build_deep,
        classes(64, 16, n_classes=10),
        F.cross_entropy,
        steps_per_block=20,
    ),
    ModelSpec(
        "resnet16",
        "ResNet-18 of width 16, 32 x 32 pixels, batch 64",
        lambda: models.build_resnet18(16),
        classes(64, 3, 32, 32, n_classes=10),
        F.cross_entropy,
        steps_per_block=5,
    ),
]
BY_NAME = {spec.name: spec for spec in ALL}

# For the memory alone: the second has 100 MB of parameters more than the first, and
# what torch itself takes in each process falls out of the difference.
SMALL = BY_NAME["mlp"]
BIG = models.BY_NAME["mlp25m"]
EVERY = {**BY_NAME, BIG.name: BIG}
