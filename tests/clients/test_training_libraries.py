"""Libraries that train on two ranks reach the bits that they reach with torch's class.

Each program trains as the library's own guide does, and returns the losses and the
wrappers.  Its docstring says how the library wraps a model: `make clients` installs all
libraries and copies these lines into docs/versions.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import paceline
import pytest
import torch
import torch.distributed as dist
from launches import Run, check_equal, check_ranks_agree
from support.clients import DEADLINE_SECONDS, needs
from support.ranks import run_ranks, values
from torch import nn

# Losses, and the wrapped models.
Trained = tuple[list[Any], list[nn.Module]]
Adam = partial(torch.optim.Adam, lr=0.02)
N_STEPS = 4


def net(n_in: int = 6, n_out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(N_STEPS)]


def fit(
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], torch.Tensor],
    data: Iterable[Any],
) -> list[torch.Tensor]:
    """Train by a loop that the user writes."""
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def distance(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def stand_in(*modules: str) -> None:
    """Replace packages that need another build of torch, and that no test uses."""
    sys.modules.update({name: MagicMock(__version__="2.9") for name in modules})


# ---- libraries of `make test`: installed and imported within seconds -----------------


def mmengine(rank: int) -> Trained:
    """a subclass with `train_step`; another skips the constructor, for GANs"""
    sys.modules["transformers"] = None  # an optional import of 2 s
    from mmengine import model as models
    from mmengine.optim import OptimWrapper, OptimWrapperDict

    class Regressor(models.BaseModel):
        def __init__(self):
            super().__init__()
            self.layers = net()

        def forward(self, inputs, data_samples=None, mode="tensor"):
            out = self.layers(inputs)
            return {"loss": (out - data_samples).square()} if mode == "loss" else out

    class Pair(models.BaseModel):
        def __init__(self):
            super().__init__()
            self.generator, self.discriminator = net(2, 4), net(4, 1)
            self.idle = nn.ReLU()

        def forward(self, noise):
            return self.generator(noise)

        def train_step(self, data, optimizers):
            real, noise = data
            fake = self(noise)
            score = self.discriminator(real) - self.discriminator(fake.detach())
            optimizers["discriminator"].update_params(-score.mean())
            optimizers["generator"].update_params(-self.discriminator(fake).mean())
            return {"score": score.mean()}

    model = models.MMDistributedDataParallel(module=Regressor())
    optimizer = OptimWrapper(Adam(model.parameters()), accumulative_counts=2)
    optimizer.initialize_count_status(model, 0, N_STEPS)
    losses = [
        model.train_step({"inputs": x, "data_samples": y}, optimizer)["loss"]
        for x, y in batches()
    ]
    pair = models.MMSeparateDistributedDataParallel(Pair()).train()
    names = ("generator", "discriminator")
    parts = {name: getattr(pair.module, name) for name in names}
    optimizers = OptimWrapperDict(
        **{name: OptimWrapper(Adam(part.parameters())) for name, part in parts.items()}
    )
    for _ in range(3):
        data = torch.randn(5, 4), torch.randn(5, 2)
        losses.append(pair.train_step(data, optimizers)["score"])
    return losses, [model, *(getattr(pair.module, name) for name in names)]


def torch_geometric(rank: int) -> Trained:
    """the user's wrapper; batches of graphs"""
    sys.modules["transformers"] = None  # as above
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import BatchNorm, GATConv, GINConv, global_add_pool

    class Graphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([GINConv(net(6, 4)), GATConv(4, 4, heads=2)])
            self.norm, self.last = BatchNorm(8), nn.Linear(8, 2)

        def forward(self, data):
            x = data.x
            for layer in self.layers:
                x = layer(x, data.edge_index).relu()
            return self.last(global_add_pool(self.norm(x), data.batch))

    def graph(n):
        return Data(x=torch.randn(n, 6), edge_index=torch.randint(n, (2, 2 * n)))

    model = nn.parallel.DistributedDataParallel(Graphs())
    data = [Batch.from_data_list([graph(n) for n in (3, 5, 4)]) for _ in range(N_STEPS)]
    losses = fit(Adam(model.parameters()), lambda b: model(b).square().mean(), data)
    return losses, [model]


# ---- libraries of `make clients` alone -----------------------------------------------


def speechbrain(rank: int) -> Trained:
    """`Brain` wraps each of its modules"""
    stand_in("torchaudio")
    import speechbrain

    class Two(speechbrain.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.head(self.modules.body(batch[0]))

        def compute_objectives(self, predictions, batch, stage):
            losses.append(nn.functional.mse_loss(predictions, batch[1]))
            return losses[-1]

    losses: list[Any] = []
    options = {"distributed_launch": True, "distributed_backend": "gloo"}
    brain = Two(
        {"body": net(6, 4), "head": net(4, 3)},
        Adam,
        hparams={},
        run_opts={**options, "device": "cpu", "noprogressbar": True},
    )
    brain.fit(range(2), batches())
    return losses, list(brain.modules.values())


def monai(rank: int) -> Trained:
    """the user's wrapper, run by `SupervisedTrainer`"""
    from ignite.engine import Events
    from monai.engines import SupervisedTrainer
    from monai.networks.nets import UNet

    unet = UNet(2, 1, 1, channels=(4, 8), strides=(2,), num_res_units=1, norm="batch")
    model = nn.parallel.DistributedDataParallel(unet)
    images = [
        {"image": torch.randn(2, 1, 8, 8), "label": torch.randn(2, 1, 8, 8)}
        for _ in range(N_STEPS)
    ]
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=2,
        train_data_loader=images,
        network=model,
        optimizer=Adam(model.parameters()),
        loss_function=nn.MSELoss(),
    )
    losses: list[Any] = []
    ended = trainer.on(Events.ITERATION_COMPLETED)
    ended(lambda engine: losses.append(engine.state.output[0]["loss"]))
    trainer.run()
    return losses, [model]


WORDS = ["<pad>", "<unk>", "<eos>", *"abcdefgh"]
TEXTS = ["a b c d", "b c e", "h g f e d", "c c a", "f e", "g b a h", "d a", "e h h"]
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": N_STEPS,
    "learning_rate": 0.02,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


def tokenizer() -> Any:
    """Return a tokenizer with a word for each letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def by_trainer(trainer: Any) -> Trained:
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, [trainer.model_wrapped]


def sentence_transformers(rank: int) -> Trained:
    """the `Trainer` of transformers, which asks accelerate"""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    config = BertConfig(vocab_size=len(WORDS), num_attention_heads=2, **sizes)
    if rank == 0:
        BertModel(config).save_pretrained("model")
        tokenizer().save_pretrained("model")
    dist.barrier()
    model = SentenceTransformer("model", device="cpu")
    arguments = SentenceTransformerTrainingArguments("out", **OPTIONS)
    pairs = Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]})
    loss = losses.MultipleNegativesRankingLoss(model)
    return by_trainer(SentenceTransformerTrainer(model, arguments, pairs, loss=loss))


def trl(rank: int) -> Trained:
    """the `Trainer` of transformers, round a model with adapters of peft"""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    config = LlamaConfig(vocab_size=len(WORDS), num_attention_heads=2, **sizes)
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        SFTConfig("out", **OPTIONS, max_length=8, bf16=False),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    )
    return by_trainer(trainer)


def fastai(rank: int) -> Trained:
    """`distrib_ctx`, which asks accelerate"""
    from fastai.basics import Callback, DataLoader, DataLoaders, Learner
    from fastai.distributed import DistributedTrainer  # noqa: F401

    class Watch(Callback):
        def after_loss(self):
            losses.append(self.loss)
            models.append(self.learn.model)

    losses: list[Any] = []
    models: list[nn.Module] = []
    torch.Tensor.cuda = lambda tensor: tensor  # fastai sends indices there always
    rows = [(x, y) for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
    loaders = DataLoaders(DataLoader(rows, bs=4), DataLoader(rows, bs=4))
    learner = Learner(loaders, net(), loss_func=nn.MSELoss(), cbs=[Watch()])
    with learner.no_bar(), learner.distrib_ctx(sync_bn=False, cpu=True):
        learner.fit(2, 0.02)
    return losses, models[:1]


def composer(rank: int) -> Trained:
    """`Trainer` of composer wraps; microbatches inside `no_sync`"""
    import torchmetrics.image  # noqa: F401 # first: it uses a torchvision that it finds

    parts = ["", ".datasets", ".models", ".models.resnet", ".ops", ".transforms"]
    parts += [".transforms.functional", ".utils"]
    stand_in("mcli", *(f"torchvision{part}" for part in parts))
    from composer import Callback, ComposerModel, Trainer

    class Regressor(ComposerModel):
        def __init__(self):
            super().__init__()
            self.layers = net()

        def forward(self, batch):
            return self.layers(batch[0])

        def loss(self, outputs, batch, *args, **kwargs):
            return nn.functional.mse_loss(outputs, batch[1])

    class Watch(Callback):
        def batch_end(self, state, logger):
            losses.append(state.loss)

    losses: list[Any] = []
    model = Regressor()
    trainer = Trainer(
        model=model,
        train_dataloader=batches(),
        max_duration="2ep",
        optimizers=Adam(model.parameters()),
        device="cpu",
        device_train_microbatch_size=2,
        callbacks=[Watch()],
        progress_bar=False,
    )
    trainer.fit()
    return losses, [trainer.state.model]


def opacus(rank: int) -> Trained:
    """`GradSampleModule` round the user's wrapper; gradients of single rows"""
    from opacus import PrivacyEngine

    model = nn.parallel.DistributedDataParallel(net())
    rows = torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches(), strict=True)))
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=Adam(model.parameters()),
        data_loader=torch.utils.data.DataLoader(rows, batch_size=4),
        noise_multiplier=0.5,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    return fit(optimizer, partial(distance, private), loader), [model]


def torchrl(rank: int) -> Trained:
    """the user's wrapper round a loss; TensorDicts in and out"""
    from tensordict import TensorDict
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss

    def transitions():
        rewards = {"reward": torch.randn(4, 1), "observation": torch.randn(4, 6)}
        ends = {name: torch.zeros(4, 1, dtype=torch.bool) for name in names}
        action = nn.functional.one_hot(torch.randint(3, (4,)), 3)
        first = {"observation": torch.randn(4, 6), "action": action}
        return TensorDict({**first, "next": {**rewards, **ends}}, batch_size=[4])

    names = ("done", "terminated")
    learner = DQNLoss(
        QValueActor(net(), in_keys=["observation"], action_space="one_hot"),
        action_space="one_hot",
    )
    learner.make_value_estimator(gamma=0.9)
    model = nn.parallel.DistributedDataParallel(learner)
    data = [transitions() for _ in range(N_STEPS)]
    losses = fit(Adam(model.parameters()), lambda batch: model(batch)["loss"], data)
    return losses, [model]


def torchft(rank: int) -> Trained:
    """a subclass with a dummy process group; its hook averages the buckets"""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2) if rank == 0 else None
    address = [server.address() if server else None]
    dist.broadcast_object_list(address)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    module = net()
    optimizer = Adam(module.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=2,
        load_state_dict=module.load_state_dict,
        state_dict=module.state_dict,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=str(rank),
    )
    model = DistributedDataParallel(manager, module)
    losses = fit(Optimizer(manager, optimizer), partial(distance, model), batches())
    assert manager.current_step() == N_STEPS
    return losses, [model]


# ---- the test ------------------------------------------------------------------------

PROGRAMS: dict[str, Callable[[int], Trained]] = {
    program.__name__: program
    for program in (
        mmengine,
        torch_geometric,
        speechbrain,
        monai,
        sentence_transformers,
        trl,
        fastai,
        composer,
        opacus,
        torchrl,
        torchft,
    )
}
ALSO = {"monai": "ignite", "trl": "peft", "fastai": "accelerate"}
ALSO["sentence_transformers"] = "datasets"
PATIENCE = {"timeout": DEADLINE_SECONDS, "group_timeout": DEADLINE_SECONDS}
# All ranks have their group already, so none connects to this port.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def train(
    rank: int, n_ranks: int, name: str, by: str, folder: str
) -> tuple[dict[str, Any], set]:
    """Return what a program reaches, and whether its wrappers are Paceline's."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank}
    sizes = {"WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "NODE_RANK": 0}
    os.environ.update({k: str(v) for k, v in {**ranks, **sizes}.items()})
    os.chdir(folder)
    if by == "paceline":
        paceline.install()
    torch.manual_seed(rank)  # so that models and data differ between the ranks
    losses, models = PROGRAMS[name](rank)
    assert len(losses) >= N_STEPS
    reached: dict[str, Any] = {"losses": list(map(float, losses))}
    reached["weights"] = [model.state_dict() for model in models]
    return reached, {isinstance(m, paceline.DistributedDataParallel) for m in models}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs(*sorted({n, ALSO.get(n, n)}))) for n in PROGRAMS],
)
def test_a_library_trains_as_with_torchs_class(name, tmp_path):
    runs = []
    for by in ("torch", "paceline"):
        arguments = (name, by, str(tmp_path))
        ended = values(run_ranks(train, 2, *arguments, env=ENVIRONMENT, **PATIENCE))
        assert {kind for _, kinds in ended for kind in kinds} == {by == "paceline"}
        runs.append(Run("", [reached for reached, _ in ended]))
    check_equal(*runs)
    check_ranks_agree(runs[1])
