"""Shared by the examples with digits: the data, and a training with records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 1
BATCH = 64  # samples per step, over all ranks or replicas
BLOCK = 11  # steps that one of the two takes before the other


class Run:
    """One of the two trainings: a model, its optimizer and its records."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model = model
        self.bare: nn.Module = getattr(model, "module", model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr, momentum=0.9, weight_decay=1e-4
        )
        self.losses: list[float] = []
        self.step_seconds: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()  # across ranks, the wrapper averages the gradients in here
        self.optimizer.step()
        self.step_seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.item())


def take_turns(
    runs: tuple[Run, Run],
    batches: list[tuple[Tensor, Tensor]],
    meet: Callable[[], object] = lambda: None,
) -> None:
    """Let two trainings take blocks of steps in turn; alternate which one begins."""
    for start in range(0, len(batches), BLOCK):
        first = len(runs[0].losses) // BLOCK % 2
        for run in runs[::-1] if first else runs:
            meet()
            for images, labels in batches[start : start + BLOCK]:
                run.step(images, labels)


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return real digits, 8 x 8: training images and labels, test images and labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        images / 16, labels, test_size=0.2, random_state=SEED, stratify=labels
    )
    train_x, test_x = (torch.tensor(x).float().view(-1, 1, 8, 8) for x in parts[:2])
    train_y, test_y = (torch.tensor(y) for y in parts[2:])
    return train_x, train_y, test_x, test_y


def batches_of_epoch(
    images: Tensor, labels: Tensor, epoch: int, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffle alike on all ranks; yield this rank's part of each batch."""
    order = torch.randperm(
        len(images), generator=torch.Generator().manual_seed(SEED + epoch)
    )
    for batch in order.split(BATCH):
        if len(batch) == BATCH:  # skip the incomplete batch of an epoch
            mine = batch[rank::ranks]
            yield images[mine], labels[mine]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """Return the largest absolute difference between any parameters or buffers."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)
