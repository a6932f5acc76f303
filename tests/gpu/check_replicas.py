"""Models trained by replicas on one GPU, against the plain module there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from checks import Check, Skip, check, is_rehearsal
from paceline._cli.bench import models
from replica_twins import assert_near, assert_same_gradients, play
from replica_world import ByHand, World
from torch import Tensor, nn
from torch.nn import functional as F
from twins import Batch, plain_step

N_STEPS = 4
N_ROWS = 14  # on 3 replicas: 5, 5 and 4


class Tokens(nn.Module):
    """An embedding, and a layer on the mean of a row's vectors."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 24, sparse=is_sparse)
        self.head = nn.Linear(24, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of each row."""
        scores: Tensor = self.head(self.embedding(tokens).mean(1))
        return scores


class Tied(nn.Module):
    """An embedding whose weight is also that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.middle = nn.Linear(24, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of each token."""
        middle = torch.tanh(self.middle(self.embedding(tokens).mean(1)))
        scores: Tensor = self.head(middle)
        return scores


class LastOfLSTM(nn.Module):
    """Two layers of LSTM, and scores of their last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 20, num_layers=2, batch_first=True)
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each sequence."""
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


class Encoder(nn.Module):
    """Two layers of a transformer's encoder, no dropout, and the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each sequence."""
        scores: Tensor = self.head(self.layers(x).mean(1))
        return scores


def mlp() -> nn.Module:
    return models.build_mlp(16, 64, 64, 5)


def smooth() -> nn.Module:
    """Layers that have second derivatives."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5))


def cnn() -> nn.Module:
    """Two convolutions with BatchNorm, whose running statistics are not the first."""
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 9, 5),
    )
    for part in layers:
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.uniform_(-0.2, 0.2)
            part.running_var.uniform_(0.5, 1.5)
    return layers


def batches_of(
    world: World,
    *shape: int,
    n_classes: int = 5,
    n_tokens: int = 0,
    n_steps: int = N_STEPS,
) -> list[Batch]:
    """Inputs of some shape, or tokens, with a class for each row."""
    g = world.generator(7)
    rows = []
    for _ in range(n_steps):
        full = (N_ROWS, *shape)
        x = torch.randn(full, generator=g)
        if n_tokens:
            x = torch.randint(n_tokens, full, generator=g)
        rows.append((x, torch.randint(n_classes, (N_ROWS,), generator=g)))
    return rows


STEP = plain_step(F.cross_entropy)


@check(worlds=(1,))
def train_mlp(world: World) -> dict[str, Any]:
    return play(world, mlp, batches_of(world, 16), STEP)


@check(worlds=(1,))
def train_cnn_with_batch_norm(world: World) -> dict[str, Any]:
    """Each replica has its rows' statistics; replica 0's are kept."""
    rows = batches_of(world, 3, 8, 8)
    return play(world, cnn, rows, STEP, limit=1e-3, has_whole=False)


@check(worlds=(1,))
def train_cnn_with_fixed_batch_norm(world: World) -> dict[str, Any]:
    """Statistics of evaluation, as in fine-tuning: rows know of no other."""
    build = lambda: cnn().eval()  # noqa: E731
    return play(world, build, batches_of(world, 3, 8, 8), STEP)


@check(worlds=(1,))
def train_embedding(world: World) -> dict[str, Any]:
    rows = batches_of(world, 6, n_tokens=200)
    return play(world, partial(Tokens, is_sparse=False), rows, STEP)


@check(worlds=(1,))
def train_sparse_embedding(world: World) -> dict[str, Any]:
    rows = batches_of(world, 6, n_tokens=200)
    return play(world, partial(Tokens, is_sparse=True), rows, STEP)


@check(worlds=(1,))
def train_lstm(world: World) -> dict[str, Any]:
    return play(world, LastOfLSTM, batches_of(world, 9, 12), STEP)


@check(worlds=(1,))
def train_transformer(world: World) -> dict[str, Any]:
    return play(world, Encoder, batches_of(world, 7, 32), STEP)


@check(worlds=(1,), seconds=90)
def train_resnet(world: World) -> dict[str, Any]:
    """Many segments, and buffers of two types: ResNet-18, of 11M parameters."""
    width = 8 if is_rehearsal() else 64
    rows = batches_of(world, 3, 32, 32, n_steps=3)
    build = partial(models.build_resnet18, width)
    # The batch's own statistics make a difference of rounding a hundred times larger.
    return play(world, build, rows, STEP, limit=5e-3, has_whole=False)


@check(worlds=(1,), seconds=90)
def train_large_mlp(world: World) -> dict[str, Any]:
    """Parameters of 16 MiB, each of which is a segment."""
    width = 256 if is_rehearsal() else 2048
    rows = batches_of(world, width, n_steps=3)
    build = partial(models.build_mlp, width, width, width, 5)
    return play(world, build, rows, STEP)


@check(worlds=(1,))
def train_tied_weights(world: World) -> dict[str, Any]:
    rows = batches_of(world, 6, n_tokens=50, n_classes=50)
    return play(world, Tied, rows, STEP)


@check(worlds=(1,))
def train_with_frozen_parameters(world: World) -> dict[str, Any]:
    """Frozen from the start, and later thawed."""

    def build() -> nn.Module:
        module = mlp()
        next(module.parameters()).requires_grad_(False)
        return module

    count = 0

    def step(model: nn.Module, optimizer: Any, batch: Batch) -> None:
        nonlocal count
        count += 1
        first = next(model.parameters())
        first.requires_grad_(count % N_STEPS == 0)  # in the last of them
        STEP(model, optimizer, batch)

    return play(world, build, batches_of(world, 16), step)


# ---- types --------------------------------------------------------------------------


def autocast_step(world: World, dtype: torch.dtype) -> Any:
    def step(model: nn.Module, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        with torch.autocast(world.device.type, dtype):
            output = model(batch[0])
            assert output.dtype == dtype, f"autocast did not reach it: {output.dtype}"
            loss = F.cross_entropy(output.float(), batch[1])
        loss.backward()

    return step


@check(worlds=(1,))
def autocast_bf16(world: World) -> dict[str, Any]:
    step = autocast_step(world, torch.bfloat16)
    rows = batches_of(world, 7, 32)
    return play(world, Encoder, rows, step, limit=5e-2, has_whole=False)


def _scaled(world: World, model: nn.Module, rows: list[Batch]) -> list[Any]:
    """Scales after each step, and parameters after the last."""
    device = world.device.type
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    seen = []
    for x, y in rows:
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            output = model(x.to(world.device))
        loss = F.cross_entropy(output.float(), y.to(world.device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return [seen, [p.detach().clone() for p in model.parameters()]]


@check(worlds=(1,))
def autocast_fp16_with_grad_scaler(world: World) -> dict[str, Any]:
    """A step overflows, in the last replica's rows alone, and is left out."""
    rows = batches_of(world, 16, n_steps=6)
    rows[3][0][-1] *= 1e30
    torch.manual_seed(1)
    module = mlp().to(world.device)
    figures = {}
    for n in (2, 3):
        right = _scaled(world, ByHand(copy.deepcopy(module), n), rows)
        mine = _scaled(world, world.wrap(copy.deepcopy(module), n), rows)
        assert mine[0] == right[0], f"scales: {mine[0]}, should be {right[0]}"
        assert mine[0][3] < mine[0][2], f"no step has overflowed: {mine[0]}"
        far = [
            assert_near(p, q, "a parameter after the last step", 1e-3)
            for p, q in zip(mine[1], right[1], strict=True)
        ]
        figures[f"{n}_replicas"] = {"scales": mine[0], "far": max(far)}
    return figures


def _of_type(world: World, dtype: torch.dtype) -> dict[str, Any]:
    rows = [(x.to(dtype), y) for x, y in batches_of(world, 16)]
    return play(world, lambda: mlp().to(dtype), rows, STEP)


def _named(name: str, function: Callable[..., Any]) -> Check:
    function.__name__ = name  # type: ignore[attr-defined]
    function.__module__ = __name__
    return Check(function, worlds=(1,))


parameters_in_bf16 = _named(
    "parameters_in_bf16", partial(_of_type, dtype=torch.bfloat16)
)
parameters_in_fp16 = _named(
    "parameters_in_fp16", partial(_of_type, dtype=torch.float16)
)
parameters_in_f64 = _named("parameters_in_f64", partial(_of_type, dtype=torch.float64))


# ---- other ways to step -------------------------------------------------------------


def pair(world: World, build: Callable[[], nn.Module], n: int = 2) -> tuple[Any, Any]:
    """A wrapper, and the plain module by hand, of the same parameters."""
    torch.manual_seed(1)
    module = build().to(world.device)
    return world.wrap(copy.deepcopy(module), n), ByHand(module, n)


@check(worlds=(1,))
def gradients_accumulate(world: World) -> dict[str, Any]:
    """Over four backwards, with gradients that are kept and zeroed in place."""

    def step(model: nn.Module, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=False)
        x, y = batch
        for shift in range(4):
            loss = F.cross_entropy(model(x.roll(shift, 0)), y)
            (loss / (shift + 1)).backward()

    return play(world, mlp, batches_of(world, 16), step)


@check(worlds=(1,))
def two_forwards_before_two_backwards(world: World) -> dict[str, Any]:
    model, by_hand = pair(world, smooth)
    x, other = world.normal(N_ROWS, 16, seed=1), world.normal(9, 16, seed=2)
    far = []
    for order in ((0, 1), (1, 0)):
        for each in (model, by_hand):
            each.zero_grad()
            losses = [each(x).square().mean(), each(other).square().sum()]
            for i in order:
                losses[i].backward()
        far.append(assert_same_gradients(model, by_hand, f"order {order},"))
    return {"far": far}


@check(worlds=(1,))
def parts_of_a_model_that_go_unused(world: World) -> None:
    """What no replica uses has no gradient, and no hook is called for it."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(16, 5) for _ in range(2))

        def forward(self, x: Tensor, which: int) -> Tensor:
            scores: Tensor = self.branches[which](x)
            return scores

    model = world.wrap(Switch())
    for which in (0, 1, 0):
        model.zero_grad()
        model(world.normal(N_ROWS, 16), which).sum().backward()
        for i, branch in enumerate(model.module.branches):
            has = [p.grad is not None for p in branch.parameters()]
            assert has == [i == which] * 2, f"branch {which} ran; branch {i}: {has}"


@check(worlds=(1,))
def a_batch_of_fewer_rows_than_replicas(world: World) -> None:
    model, by_hand = pair(world, smooth, 3)
    for rows in (1, 2, 3, 4, 1):
        x = world.normal(rows, 16, seed=rows)
        plain = by_hand.module
        model.zero_grad()
        plain.zero_grad()
        out, right = model(x), plain(x)
        assert_near(out, right, f"output for {rows} rows", 2e-4)
        out.square().sum().backward()
        right.square().sum().backward()
        assert_same_gradients(model, plain, f"{rows} rows,")


@check(worlds=(1,))
def one_device_is_as_torchs_class(world: World) -> dict[str, Any]:
    """`device_ids=[0]` beside torch.nn.DataParallel(device_ids=[0])."""
    if is_rehearsal():
        raise Skip("torch's class has no replicas without a GPU")
    torch.manual_seed(1)
    module = mlp().to(world.device)
    theirs = torch.nn.DataParallel(copy.deepcopy(module), device_ids=[0])
    ours = world.wrap(module, device_ids=[0])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = world.normal(N_ROWS, 16)
    outputs = [ours(x), theirs(x), ours(x.cpu()), theirs(x.cpu())]
    for number, out in enumerate(outputs):
        assert out.device == world.device, f"output {number} is on {out.device}"
        assert_near(out, outputs[1], f"output {number}")
    outputs[0].square().sum().backward()
    outputs[1].square().sum().backward()
    return {"far": assert_same_gradients(ours, theirs)}
