"""ignite: ranks of idist.Parallel, auto_model, a trainer, a checkpoint."""

import argparse

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import TensorDataset


def train(out, resume):
    """Train two epochs, or the second from a checkpoint."""
    torch.manual_seed(6)
    data = TensorDataset(torch.rand(256, 64), torch.randint(10, (256,)))
    loader = idist.auto_dataloader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)
    )
    model = idist.auto_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = idist.auto_optim(optimizer)
    loss = nn.CrossEntropyLoss()

    trainer = create_supervised_trainer(
        model, optimizer, loss, gradient_accumulation_steps=2
    )
    found = {"accuracy": Accuracy(), "loss": Loss(loss)}
    evaluator = create_supervised_evaluator(model, found)
    told = {"losses": [], "metrics": []}

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle(engine):
        loader.sampler.set_epoch(engine.state.epoch)

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine):
        told["losses"].append(engine.state.output)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        evaluator.run(loader)
        told["metrics"].append(dict(evaluator.state.metrics))

    parts = {"trainer": trainer, "model": model, "optimizer": optimizer}
    saver = DiskSaver(f"{out}/kept", create_dir=True, require_empty=False)
    keep = Checkpoint(parts, saver, n_saved=None)
    if not resume:
        trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), keep)
    else:
        kept = torch.load(f"{resume}/kept/checkpoint_8.pt", weights_only=True)
        Checkpoint.load_objects(parts, kept)
    trainer.run(loader, max_epochs=2)

    told["losses"], told["metrics"] = told["losses"][-8:], told["metrics"][-1]
    told["weights"] = {k: v.clone() for k, v in model.state_dict().items()}
    return told


def run(local_rank, out, resume):
    told = {"train": train(out, None)}
    if resume:
        told["resumed"] = train(out, resume)
    torch.save(told, f"{out}/rank{idist.get_rank()}.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--port", type=int, default=2222)
    parser.add_argument("--resume")
    parser.add_argument("--start", default="spawn")
    args = parser.parse_args()
    options = {"master_port": args.port, "start_method": args.start}
    with idist.Parallel("gloo", nproc_per_node=2, **options) as parallel:
        parallel.run(run, args.out, args.resume)
