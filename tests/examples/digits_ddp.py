"""Train a small CNN on handwritten digits, once with torch's DDP, once with ours.

The script starts its own ranks (two by default), so it is run like any other:

    python tests/examples/digits_ddp.py            about a minute
    python tests/examples/digits_ddp.py --quick    a few epochs, for a first look

Every rank holds the same two models: one wrapped by torch's DistributedDataParallel,
one by Paceline's.  They start from the same seed, see the same batches and take turns,
a few steps each, so that whatever else the machine does slows both alike.  At the end
the losses and the parameters of the two are compared, and their step times.

To use Paceline in a script of your own, only one name changes: `run_rank` shows where.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import paceline
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from digits_report import Outcome, Progress, judge, plot, report
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 1
BATCH = 64  # samples a step, all ranks together
BLOCK = 11  # steps that one of the two takes before it is the other's turn


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    ranks: int
    epochs: int
    least_accuracy: float
    out: Path


def build_model() -> nn.Module:
    """Two convolutions and two linear layers, 152 thousand parameters."""
    torch.manual_seed(SEED)  # the same weights in both models, on every rank
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),  # its statistics are rank 0's, as in torch's DDP
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Run:
    """One of the two trainings: a wrapped model, its optimizer, what it recorded."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.bare = build_model()
        self.model = wrap(self.bare)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4
        )
        self.losses: list[float] = []
        self.step_seconds: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One training step, timed as a whole."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()  # the wrapper averages the gradients over the ranks in here
        self.optimizer.step()
        self.step_seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.item())


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
    images: Tensor, labels: Tensor, epoch: int, rank: int, ranks: int
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
    """Share of the images that are classified rightly."""
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """The largest absolute difference between any two parameters or buffers."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def mean_over_ranks(values: list[float]) -> list[float]:
    """Average each value with its like on the other ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def run_rank(rank: int, options: Options, folder: str) -> None:
    """Everything that one rank does; rank 0 leaves `outcome.json` in `folder`."""
    torch.set_num_threads(1)  # the ranks share the cores: one each
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=options.ranks,
    )
    train_x, train_y, test_x, test_y = load_data()

    theirs = Run(torch.nn.parallel.DistributedDataParallel)
    ours = Run(paceline.DistributedDataParallel)  # <- the one name that changes

    turn = 0
    with Progress(options.epochs, show=rank == 0) as progress:
        for epoch in range(options.epochs):
            share = [*batches_of_epoch(train_x, train_y, epoch, rank, options.ranks)]
            for start in range(0, len(share), BLOCK):
                turn += 1
                for run in (theirs, ours) if turn % 2 else (ours, theirs):
                    dist.barrier()
                    for images, labels in share[start : start + BLOCK]:
                        run.step(images, labels)
            progress.epoch_done(epoch, theirs.losses[-1], ours.losses[-1])

    # Over the ranks: the loss of whole batches, and step times.  One rank's clock alone
    # would mislead, since a rank that was late finds the others waiting next time.
    losses = mean_over_ranks(theirs.losses), mean_over_ranks(ours.losses)
    seconds = mean_over_ranks(theirs.step_seconds), mean_over_ranks(ours.step_seconds)

    # Every rank calls save, rank 0 writes.  Saved without the prefix "module.", the
    # file fits the bare model; load(path) alone would return the state dict.
    checkpoint = options.out / "digits.pt"
    paceline.save(ours.model, checkpoint, prefix="strip")
    dist.barrier()
    loaded = build_model()
    paceline.load(checkpoint, loaded)

    if rank == 0:
        outcome = Outcome(
            ranks=options.ranks,
            torch_loss=losses[0],
            paceline_loss=losses[1],
            torch_seconds=seconds[0],
            paceline_seconds=seconds[1],
            torch_accuracy=accuracy(theirs.bare, test_x, test_y),
            paceline_accuracy=accuracy(loaded, test_x, test_y),
            parameter_difference=largest_difference(theirs.bare, ours.bare),
            checkpoint_difference=largest_difference(loaded, ours.bare),
        )
        Path(folder, "outcome.json").write_text(json.dumps(vars(outcome)))
    dist.barrier()
    dist.destroy_process_group()
    # The group's threads outlive it, and torch's DDP now and then aborts a process that
    # ends among them ("terminate called without an active exception"): end at once.
    sys.stdout.flush()
    os._exit(0)


def parse_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--epochs", type=int, help="default 15, with --quick 4")
    parser.add_argument("--quick", action="store_true", help="short, 90 %% will do")
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    args = parser.parse_args()
    if not 1 <= args.ranks <= BATCH:
        parser.error(f"--ranks must be 1 to {BATCH}")
    epochs = (4 if args.quick else 15) if args.epochs is None else args.epochs
    if epochs < 1:
        parser.error("--epochs must be at least 1")
    least_accuracy = 0.90 if args.quick else 0.97
    return Options(args.ranks, epochs, least_accuracy, args.out.resolve())


def main() -> None:
    """Start the ranks, wait for them, report, and fail if the result is not right."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(options, folder), nprocs=options.ranks)
        outcome = Outcome(**json.loads(Path(folder, "outcome.json").read_text()))
    report(outcome)
    plot(outcome, options.out / "digits_ddp.png")
    faults = judge(outcome, options.least_accuracy)
    if faults:
        sys.exit("\n".join(f"digits_ddp: {fault}" for fault in faults))


if __name__ == "__main__":
    main()
