"""A training loop with accelerate: accumulation, clipping, joins, saved states."""

import argparse
import itertools

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    set_seed,
)
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms import Join
from torch.utils.data import DataLoader, Subset, TensorDataset

N_IMAGES = 360  # of 8 by 8 pixels


def digits():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:N_IMAGES] / 16, dtype=torch.float32)
    return TensorDataset(images, torch.tensor(labels[:N_IMAGES]))


def make_all(accelerator, norm=nn.BatchNorm1d):
    set_seed(3)
    model = nn.Sequential(nn.Linear(64, 48), norm(48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    return accelerator.prepare(model, optimizer, loader, schedule)


def weights_of(accelerator, model):
    state = accelerator.unwrap_model(model).state_dict()
    return {name: value.clone() for name, value in state.items()}


def train(accelerator, out, resume):
    """Train two epochs, or the second from a saved state."""
    model, optimizer, loader, schedule = make_all(accelerator)
    first, told = 0, {"losses": []}
    if resume:
        accelerator.load_state(f"{resume}/state")
        first = 1
    for epoch in range(first, 2):
        model.train()
        loader.set_epoch(epoch)
        told["losses"].clear()
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    told["norm"] = norm.item()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            told["losses"].append(loss.item())
        if epoch == 0 and not resume:
            accelerator.save_state(f"{out}/state")
    model.eval()
    found = []
    for images, labels in loader:
        with torch.no_grad():
            right = model(images).argmax(1) == labels
        found.append(accelerator.gather_for_metrics(right))
    told["n_right"] = torch.cat(found).sum().item()
    told["n_seen"] = len(torch.cat(found))
    told["weights"] = weights_of(accelerator, model)
    told["lr"] = schedule.get_last_lr()
    return told


def forward_twice_without_sync(accelerator):
    """Accumulate by hand, and request the average in the last backward."""
    model, optimizer, loader, _ = make_all(accelerator)
    batches = list(itertools.islice(loader, 6))
    losses = []
    for one, two in zip(batches[::2], batches[1::2], strict=True):
        with accelerator.no_sync(model):
            first = F.cross_entropy(model(one[0]), one[1])
            second = F.cross_entropy(model(two[0]), two[1])
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        losses += [first.item(), second.item()]
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": weights_of(accelerator, model)}


def step(accelerator, model, optimizer, images, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    accelerator.backward(loss)
    optimizer.step()
    return loss.item()


def join_uneven(accelerator):
    """Give rank 1 a batch fewer than rank 0, with torch's Join.

    (On CPUs accelerate's join_uneven_inputs only warns that it does nothing.)
    """
    model, optimizer, _, _ = make_all(accelerator, nn.LayerNorm)
    rank = accelerator.process_index
    part = Subset(digits(), range(rank, 90 - 20 * rank, 2))
    loader = DataLoader(part, batch_size=16)
    with Join([model]):
        losses = [step(accelerator, model, optimizer, *batch) for batch in loader]
    return {"losses": losses, "weights": weights_of(accelerator, model)}


def compress():
    hook = DDPCommunicationHookType.FP16
    options = DistributedDataParallelKwargs(
        comm_hook=hook, gradient_as_bucket_view=True
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    model, optimizer, loader, _ = make_all(accelerator)
    batches = itertools.islice(loader, 5)
    losses = [step(accelerator, model, optimizer, *batch) for batch in batches]
    return {"losses": losses, "weights": weights_of(accelerator, model)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    told = {"train": train(accelerator, args.out, None)}
    accelerator.clear()
    if args.resume:
        told["resumed"] = train(accelerator, args.out, args.resume)
    told["no sync"] = forward_twice_without_sync(accelerator)
    told["join"] = join_uneven(accelerator)
    told["fp16"] = compress()
    torch.save(told, f"{args.out}/rank{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
