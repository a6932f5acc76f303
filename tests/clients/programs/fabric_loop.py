"""A loop with Lightning's Fabric, which runs this script again as rank 1."""

import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix


def train(fabric, out, resume):
    """Train two epochs, or the second from a saved state."""
    fabric.seed_everything(4, verbose=False)

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:256] / 16, dtype=torch.float32)
    data = TensorDataset(images, torch.tensor(labels[:256]))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16))

    module = nn.Sequential(
        nn.Linear(64, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Linear(48, 10)
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(module, optimizer)
    accuracy = MulticlassAccuracy(10, average="micro", dist_sync_on_step=True)
    confusion = MulticlassConfusionMatrix(10)
    mean_loss = MeanMetric()

    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if resume:
        fabric.load(f"{resume}/state.ckpt", state)
    told = {}
    for epoch in range(state["epoch"], 2):
        losses, accuracies = [], []
        for metric in (accuracy, confusion, mean_loss):
            metric.reset()
        for i, (x, y) in enumerate(loader):
            is_accumulating = i % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                scores = model(x)
                loss = F.cross_entropy(scores, y)
                fabric.backward(loss)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            accuracies.append(accuracy(scores.detach(), y))  # over both ranks
            confusion.update(scores.detach(), y)
            mean_loss.update(loss.detach())
        told = {
            "losses": losses,
            "accuracies": accuracies,
            "confusion": confusion.compute(),
            "mean loss": mean_loss.compute(),
            "gathered": fabric.all_gather(loss.detach()),
            "weights": module.state_dict(),
        }
        if epoch == 0:
            state["epoch"] = 1
            fabric.save(f"{out}/state.ckpt", state)
    return told


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    told = {"train": train(fabric, args.out, None)}
    if args.resume:
        told["resumed"] = train(fabric, args.out, args.resume)
    torch.save(told, f"{args.out}/rank{fabric.global_rank}.pt")


if __name__ == "__main__":
    main()
