"""The models on which DataParallel is timed: from tiny steps to long ones.

A batch here is that of one replica; all contestants train on two of them together.  See
`paceline._cli.bench.models` for why the inputs are random and the learning rate small.
"""

from __future__ import annotations

from collections.abc import Callable

import bench_models as models
import torch
from paceline._cli.bench.models import Batch, ModelSpec, classes
from torch import Tensor, nn
from torch.nn import functional as F


class LastOfLSTM(nn.Module):
    """An LSTM of width 256 over a sequence, and scores from its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


class LoopOfGRUCells(nn.Module):
    """A GRU cell of width 128, called in a Python loop, and scores at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(64, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 128)
        for step in x.unbind(1):
            state = self.cell(step, state)
        scores: Tensor = self.head(state)
        return scores


def build_deep() -> nn.Module:
    """Make 200 layers of width 16 and a last one: 402 parameters, hardly any work.

    Orthogonal weights with tanh carry values and gradients through so many layers;
    with torch's initialisation they would end as denormal numbers.
    """
    layers: list[nn.Module] = []
    for _ in range(200):
        linear = nn.Linear(16, 16)
        nn.init.orthogonal_(linear.weight)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 10))


def spec(
    name: str,
    title: str,
    build: Callable[[], nn.Module],
    make_batch: Callable[[torch.Generator], Batch],
) -> ModelSpec:
    """Make an entry; the length of turns is in seconds, not in steps."""
    return ModelSpec(name, title, build, make_batch, F.cross_entropy, steps_per_block=0)


FORMER = "transformer, 4 layers, d=256, 3.7M"
ALL = [
    spec(
        "resnet18",
        "ResNet-18 for 32 x 32, 11M, 8 rows",
        models.build_resnet18,
        classes(8, 3, 32, 32, n_classes=10),
    ),
    spec(
        "lstm",
        "LSTM 256, 50 steps, 16 rows",
        LastOfLSTM,
        classes(16, 50, 64, n_classes=10),
    ),
    spec("transformer", f"{FORMER}, 2 rows", models.Transformer, models.tokens(2, 32)),
    spec(
        "transformer-8", f"{FORMER}, 8 rows", models.Transformer, models.tokens(8, 32)
    ),
    spec(
        "gru-cells",
        "GRU cells of 128 in a loop, 50 steps, 16 rows",
        LoopOfGRUCells,
        classes(16, 50, 64, n_classes=10),
    ),
    spec(
        "digits",
        "digits MLP, 0.2M, 32 rows",
        lambda: models.build_mlp(64, 416, 416, 10),
        classes(32, 64, n_classes=10),
    ),
    spec(
        "deep", "200 layers of 16, 32 rows", build_deep, classes(32, 16, n_classes=10)
    ),
]
BY_NAME = {entry.name: entry for entry in ALL}
