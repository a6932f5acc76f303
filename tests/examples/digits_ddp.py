"""Train a small CNN on handwritten digits, once with torch's DDP, once with ours.

The script starts its own ranks (two by default).  Run it like any other:

    python tests/examples/digits_ddp.py            about a minute
    python tests/examples/digits_ddp.py --quick    a few epochs, for a first look

Every rank has the same two models: one wrapped by torch's DistributedDataParallel, one
by Paceline's.  They start from the same seed, get the same batches and take turns, a
few steps each, so that other load on the machine slows both alike.  At the end the
losses, the parameters and the step times of the two are compared.

To use Paceline in your own script, change one name: `run_rank` shows where.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import paceline
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from digits import (
    BATCH,
    SEED,
    Run,
    accuracy,
    batches_of_epoch,
    largest_difference,
    load_data,
    take_turns,
)
from digits_report import Outcome, Side, judge, plot, report, show_epoch
from torch import nn

LR = 0.05


@dataclass(frozen=True)
class Options:
    ranks: int
    epochs: int
    least_accuracy: float
    out: Path


def build_model() -> nn.Module:
    """Make two convolutions and two linear layers, with 152 thousand parameters."""
    torch.manual_seed(SEED)  # the same weights in both models, on every rank
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),  # with rank 0's statistics, as in torch's DDP
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


def mean_over_ranks(values: list[float]) -> list[float]:
    """Average each value over ranks."""
    return paceline.mean(torch.tensor(values, dtype=torch.float64)).tolist()


def agreement(ranks: int, steps: int) -> dict[str, float]:
    """Return how many losses of the two trainings must agree, and how closely.

    A sum of two numbers is the same in either order: on up to two ranks, all bits are
    equal to the end.  With more ranks, the order of summation changes the last bit of a
    gradient.  Training amplifies that from step to step, so only the first losses can
    be compared, up to rounding.
    """
    if ranks <= 2:
        return {"compared_steps": steps, "loss_tolerance": 0.0}
    return {"compared_steps": min(steps, 40), "loss_tolerance": 1e-5}


def run_rank(rank: int, options: Options, folder: str) -> None:
    """Run one rank; rank 0 writes `outcome.json` to `folder`."""
    torch.set_num_threads(1)  # one core per rank
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=options.ranks,
    )
    train_x, train_y, test_x, test_y = load_data()

    theirs = Run(torch.nn.parallel.DistributedDataParallel(build_model()), LR)
    ours = Run(paceline.DistributedDataParallel(build_model()), LR)  # <- one name

    names = ("torch", "paceline")
    for epoch in range(options.epochs):
        share = [*batches_of_epoch(train_x, train_y, epoch, rank, options.ranks)]
        take_turns((theirs, ours), share, dist.barrier)
        if rank == 0:
            losses = dict(zip(names, (theirs.losses[-1], ours.losses[-1]), strict=True))
            show_epoch(epoch, options.epochs, **losses)

    # Average losses and step times over ranks.  The clock of one rank would mislead,
    # since a rank that was late finds the others waiting in the next step.
    losses = mean_over_ranks(theirs.losses), mean_over_ranks(ours.losses)
    seconds = mean_over_ranks(theirs.step_seconds), mean_over_ranks(ours.step_seconds)

    # Every rank calls save; rank 0 writes.  Without the prefix "module.", a bare model
    # can load the file; load(path) alone would return the state dict.
    checkpoint = options.out / "digits.pt"
    paceline.save(ours.model, checkpoint, prefix="strip")
    dist.barrier()
    loaded = build_model()
    paceline.load(checkpoint, loaded)

    if rank == 0:
        reached = (accuracy(model, test_x, test_y) for model in (theirs.bare, loaded))
        sides = (
            Side(*each) for each in zip(names, losses, seconds, reached, strict=True)
        )
        outcome = Outcome(
            *sides,
            title=f"{options.ranks} ranks",
            **agreement(options.ranks, len(theirs.losses)),
            parameter_difference=largest_difference(theirs.bare, ours.bare),
            checkpoint_difference=largest_difference(loaded, ours.bare),
        )
        Path(folder, "outcome.json").write_text(json.dumps(asdict(outcome)))
    dist.barrier()
    dist.destroy_process_group()
    # The group's threads outlive it.  If a process ends while they run, torch's DDP may
    # abort it ("terminate called without an active exception"): end at once.
    sys.stdout.flush()
    os._exit(0)


def parse_options() -> Options:
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
    """Start the ranks, wait for them, report, and fail if the result is wrong."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(options, folder), nprocs=options.ranks)
        outcome = Outcome.load(json.loads(Path(folder, "outcome.json").read_text()))
    report(outcome)
    plot(outcome, options.out / "digits_ddp.png")
    faults = judge(outcome, options.least_accuracy)
    if faults:
        sys.exit("\n".join(f"digits_ddp: {fault}" for fault in faults))


if __name__ == "__main__":
    main()
