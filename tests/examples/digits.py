"""What the examples with digits share: the data, and a training that is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 1
BATCH = 64  # samples a step, all ranks or replicas together
BLOCK = 11  # steps that one of the two takes before it is the other's turn


class Run:
    """One of the two trainings: a model, its optimizer, what it recorded."""

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
    """Let two trainings take blocks of steps in turn, beginning with either in turn."""
    for start in range(0, len(batches), BLOCK):
        first = len(runs[0].losses) // BLOCK % 2
        for run in runs[::-1] if first else runs:
            meet()
            for images, labels in batches[start : start + BLOCK]:
                run.step(images, labels)


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Real digits, 8 x 8 pixels: training images, labels, test images, labels."""
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
    """Shuffle alike on all ranks; this rank's share of each batch."""
    order = torch.randperm(
        len(images), generator=torch.Generator().manual_seed(SEED + epoch)
    )
    for batch in order.split(BATCH):
        if len(batch) == BATCH:  # the odd rest of an epoch is left out
            mine = batch[rank::ranks]
            yield images[mine], labels[mine]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """The largest absolute difference between any two parameters or buffers."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)
