"""Train a small CNN on handwritten digits: as a plain module, and by DataParallel.

    python tests/examples/digits_dp.py            half a minute
    python tests/examples/digits_dp.py --quick    a few epochs, for a first look

One line wraps the model.  The script is an ordinary one and starts no processes.  With
GPUs it trains on all of them.  On the CPU it trains with two replicas that take turns,
to try, test and teach such code.

Two trainings start from the same seed, get the same batches and take turns, a few steps
each.  At the end their losses, parameters, memory and step times are compared.
"""

import argparse
import sys
from pathlib import Path

import paceline
import torch
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
from torch import Tensor, nn

# Sums over each half of a batch are rounded differently than the sum over the whole.
# Training amplifies that from step to step, to about 1e-6 here, so losses agree nearly,
# for a while.  A wrong gradient would change the first digits.
COMPARED_STEPS = 330
LOSS_TOLERANCE = 1e-4
LR = 0.1
MIB = 2**20


class Net(nn.Module):
    """Two convolutions and two linear layers, with 152 thousand parameters.

    It has no BatchNorm, which would use statistics of each replica's half of the batch.
    It is smooth: with a ReLU, a rounding near 0 could make the trainings diverge.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GELU(),
            nn.AvgPool2d(2),
        )
        self.scores = nn.Sequential(
            nn.Linear(64 * 4 * 4, 128), nn.GELU(), nn.Linear(128, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Score the ten digits for each image."""
        scores: Tensor = self.scores(self.features(images).flatten(1))
        return scores


def kept_for_backward(model: nn.Module, images: Tensor) -> float:
    """Return the MiB that a CPU forward keeps for backward; count aliases once."""
    n_bytes: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        n_bytes[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        scores = model(images)
    assert scores.requires_grad  # keeps the graph and its tensors alive until here
    return sum(n_bytes.values()) / MIB


def build_model() -> Net:
    """Make a model with the same weights each time."""
    torch.manual_seed(SEED)
    return Net()


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--replicas", type=int, help="default: all GPUs; 2 on the CPU")
parser.add_argument("--epochs", type=int, help="default 15, with --quick 4")
parser.add_argument("--quick", action="store_true", help="short, 90 %% will do")
parser.add_argument("--out", type=Path, default=Path("build/demo"))
options = parser.parse_args()
epochs = options.epochs or (4 if options.quick else 15)
options.out.mkdir(parents=True, exist_ok=True)

n_gpus = torch.cuda.device_count()
device = "cuda" if n_gpus else "cpu"
n_replicas = options.replicas or n_gpus or 2
devices = [i % n_gpus for i in range(n_replicas)] if n_gpus else ["cpu"] * n_replicas

train_x, train_y, test_x, test_y = (part.to(device) for part in load_data())
plain = Run(build_model().to(device), LR)

model = build_model().to(device)
dp = paceline.DataParallel(model, devices)  # <- one line
ours = Run(dp, LR)

for epoch in range(epochs):
    take_turns((plain, ours), [*batches_of_epoch(train_x, train_y, epoch)])
    show_epoch(epoch, epochs, plain=plain.losses[-1], paceline=ours.losses[-1])

# Without the prefix "module.", the bare model can load the file.
checkpoint = options.out / "digits_dp.pt"
paceline.save(dp, checkpoint, prefix="strip")
loaded = build_model().to(device)
paceline.load(checkpoint, loaded)

reached = [accuracy(model, test_x, test_y) for model in (plain.bare, loaded)]
outcome = Outcome(
    Side("plain", plain.losses, plain.step_seconds, reached[0]),
    Side("paceline", ours.losses, ours.step_seconds, reached[1]),
    title=f"{n_replicas} replicas",
    compared_steps=min(COMPARED_STEPS, len(plain.losses)),
    loss_tolerance=LOSS_TOLERANCE,
    parameter_difference=largest_difference(plain.bare, ours.bare),
    checkpoint_difference=largest_difference(loaded, ours.bare),
)
report(outcome)
if n_gpus:
    used = [torch.cuda.max_memory_allocated(gpu) / MIB for gpu in range(n_gpus)]
    print("most memory in use, MiB a GPU: " + ", ".join(f"{x:.1f}" for x in used))
else:
    kept = [kept_for_backward(run.model, train_x[:BATCH]) for run in (plain, ours)]
    print("kept from forward to backward, MiB: {:.1f}, {:.1f}".format(*kept))
    print("CPU replicas take turns: speed needs GPUs, or ranks as in digits_ddp.py")
plot(outcome, options.out / "digits_dp.png")
faults = judge(outcome, least_accuracy=0.90 if options.quick else 0.97)
if faults:
    sys.exit("\n".join(f"digits_dp: {fault}" for fault in faults))
