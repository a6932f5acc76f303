"""A notebook's cell, in which accelerate runs a function on ranks."""

import argparse

import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(out):
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
    inputs = torch.randn(48, 6)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    told = {"losses": losses, "weights": accelerator.unwrap_model(model).state_dict()}
    torch.save(told, f"{out}/rank{accelerator.process_index}.pt")
    accelerator.end_training()


parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--port", default="29500")
args = parser.parse_args()
notebook_launcher(train, (args.out,), num_processes=2, use_port=args.port)
