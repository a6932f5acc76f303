"""Lightning's Trainer: automatic and manual optimization, strategies, checkpoints."""

import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

N_IMAGES = 256  # of 8 by 8 pixels


def loader(shuffle):
    drawn = torch.Generator().manual_seed(1)
    images = torch.rand(N_IMAGES, 64, generator=drawn)
    labels = torch.randint(10, (N_IMAGES,), generator=drawn)
    return DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=shuffle)


class Classifier(L.LightningModule):
    """The usual case, with a metric and with BatchNorm's buffers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")
        self.told = []

    def training_step(self, batch, index):
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        self.told.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Adversaries(L.LightningModule):
    """A generator and a discriminator, stepped by hand in turn."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 64))
        self.judge = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 1))
        self.told = []

    def training_step(self, batch, index):
        images, _ = batch
        noise = torch.randn(len(images), 8)
        real, fake = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        one, other = self.optimizers()
        score = F.binary_cross_entropy_with_logits

        self.toggle_optimizer(one)
        loss = score(self.judge(self.generator(noise)), real)
        self.manual_backward(loss)
        one.step()
        one.zero_grad()
        self.untoggle_optimizer(one)

        self.toggle_optimizer(other)
        drawn = self.generator(noise).detach()
        judged = score(self.judge(images), real) + score(self.judge(drawn), fake)
        self.manual_backward(judged)
        other.step()
        other.zero_grad()
        self.untoggle_optimizer(other)
        self.told += [loss.item(), judged.item()]

    def configure_optimizers(self):
        parts = self.generator, self.judge
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]


class ByHand(Classifier):
    """One optimizer, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.manual_backward(loss)
        optimizer.step()
        self.told.append(loss.item())


class Recorder(Callback):
    """Adds a rank's losses, weights and metrics to its file."""

    def __init__(self, out, title):
        self.out, self.title = out, title

    def on_fit_end(self, trainer, module):
        path = f"{self.out}/rank{trainer.global_rank}.pt"
        told = torch.load(path) if os.path.exists(path) else {}
        told[self.title] = {
            "losses": module.told[-4:],
            "weights": module.state_dict(),
            "metrics": dict(trainer.callback_metrics),
        }
        torch.save(told, path)


def fit(args, title, make_module, strategy, resume=None, **options):
    L.seed_everything(2, verbose=False)
    module = make_module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        default_root_dir=args.out,
        callbacks=[Recorder(args.out, title), *options.pop("callbacks", [])],
        logger=False,
        enable_checkpointing=False if title != "train" else None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"max_epochs": 1, "limit_train_batches": 4, **options},
    )
    val_loader = loader(False) if make_module is Classifier else None
    trainer.fit(module, loader(True), val_loader, ckpt_path=resume)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--resume")
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()

    if args.short:
        fit(args, "train", Classifier, "ddp")
        return
    keep = ModelCheckpoint(f"{args.out}/kept", "{epoch}", save_top_k=-1)
    fit(
        args,
        "train",
        Classifier,
        args.strategy,
        resume=args.resume and f"{args.resume}/kept/epoch=0.ckpt",
        callbacks=[keep],
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    if args.resume or args.strategy == "ddp_spawn":
        return
    # Each optimizer's backward leaves out the other's parameters.
    fit(
        args, "adversaries", Adversaries, f"{args.strategy}_find_unused_parameters_true"
    )
    if args.strategy == "ddp":
        static = DDPStrategy(static_graph=True, gradient_as_bucket_view=True)
        fit(args, "static graph", Classifier, static)
        fit(args, "static by hand", ByHand, DDPStrategy(static_graph=True))
        hooked = DDPStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook)
        fit(args, "fp16", Classifier, hooked)


if __name__ == "__main__":
    main()
