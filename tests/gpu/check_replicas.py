"""Models in float32 and 16 bits by replicas on one GPU, beside the plain module.

check_programs.py has all else, in float64.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import bench_models as models
import torch
from checks import Skip, add, check, is_fake, rehearsed
from replica_twins import assert_near, assert_same_gradients, play
from replica_world import ByHand, World
from torch import Tensor, nn
from torch.nn import functional as F
from twins import Batch, plain_step, scaled_steps

N_STEPS = 4
N_ROWS = 14  # on 3 replicas: 5, 5 and 4


class Scores(nn.Module):
    """A body, a function of its output, and a last layer."""

    def __init__(
        self, body: nn.Module, take: Callable[[Any], Tensor], head: nn.Module
    ) -> None:
        super().__init__()
        self.body, self.take, self.head = body, take, head

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of each row."""
        scores: Tensor = self.head(self.take(self.body(x)))
        return scores


def mean_of(x: Tensor) -> Tensor:
    """Return the mean over time."""
    return x.mean(1)


def sparse_tokens() -> nn.Module:
    embedding = nn.Embedding(200, 24, sparse=True)
    return Scores(embedding, mean_of, nn.Linear(24, 5))


def lstm() -> nn.Module:
    body = nn.LSTM(12, 20, num_layers=2, batch_first=True)
    return Scores(body, lambda out: out[0][:, -1], nn.Linear(20, 5))


def encoder() -> nn.Module:
    """Make two layers of a transformer's encoder, without dropout."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Scores(body, mean_of, nn.Linear(32, 5))


def mlp() -> nn.Module:
    return models.build_mlp(16, 64, 64, 5)


def smooth() -> nn.Module:
    """Make layers that have second derivatives."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5))


def cnn() -> nn.Module:
    """Make two convolutions with BatchNorm, with non-initial running statistics."""
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
    shape: tuple[int, ...],
    n_tokens: int = 0,
    n_steps: int = N_STEPS,
    dtype: torch.dtype = torch.float32,
) -> list[Batch]:
    """Return inputs of a shape, or tokens, with a class for each row."""
    g = world.generator(7)
    rows = []
    for _ in range(n_steps):
        full = (N_ROWS, *shape)
        x = torch.randn(full, generator=g).to(dtype)
        if n_tokens:
            x = torch.randint(n_tokens, full, generator=g)
        rows.append((x, torch.randint(5, (N_ROWS,), generator=g)))
    return rows


STEP = plain_step(F.cross_entropy)


def trains(
    name: str,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    limits: dict[str, Any] | None = None,
    **batches: Any,
) -> None:
    """Add a check that trains a model on batches of a shape."""

    def train(world: World) -> dict[str, Any]:
        rows = batches_of(world, shape, **batches)
        return play(world, build, rows, STEP, **(limits or {}))

    add(globals(), name, train, worlds=(1,), seconds=90)


# The batch's statistics make a rounding difference a hundred times larger.
NORM, DEEP_NORM = ({"limit": x, "has_whole": False} for x in (1e-3, 5e-3))
WIDE = rehearsed(2048, 256)
wide_mlp = partial(models.build_mlp, WIDE, WIDE, WIDE, 5)  # a segment per parameter
resnet = partial(models.build_resnet18, rehearsed(64, 8))  # many segments, two dtypes

trains("train_mlp", mlp, (16,))
trains("train_cnn_with_batch_norm", cnn, (3, 8, 8), NORM)  # replica 0's are kept
trains("train_sparse_embedding", sparse_tokens, (6,), n_tokens=200)
trains("train_lstm", lstm, (9, 12))
trains("train_transformer", encoder, (7, 32))
trains("train_resnet", resnet, (3, 32, 32), DEEP_NORM, n_steps=3)
trains("train_large_mlp", wide_mlp, (WIDE,), n_steps=3)
trains("parameters_in_bf16", lambda: mlp().bfloat16(), (16,), dtype=torch.bfloat16)
trains("parameters_in_fp16", lambda: mlp().half(), (16,), dtype=torch.float16)


# ---- dtypes -------------------------------------------------------------------------


@check(worlds=(1,))
def autocast_bf16(world: World) -> dict[str, Any]:
    def step(model: nn.Module, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        with torch.autocast(world.device.type, torch.bfloat16):
            output = model(batch[0])
        assert output.dtype == torch.bfloat16, f"autocast did not reach it: {output}"
        F.cross_entropy(output.float(), batch[1]).backward()

    rows = batches_of(world, (7, 32))
    return play(world, encoder, rows, step, limit=5e-2, has_whole=False)


@check(worlds=(1,))
def autocast_fp16_with_grad_scaler(world: World) -> dict[str, Any]:
    """A step overflows, only in the last replica's rows, and is skipped."""
    rows = batches_of(world, (16,), n_steps=6)
    rows[3][0][-1] *= 1e30
    torch.manual_seed(1)
    module = mlp().to(world.device)
    figures = {}
    for n in (2, 3):
        wrapped = ByHand(copy.deepcopy(module), n), world.wrap(copy.deepcopy(module), n)
        right, mine = (
            scaled_steps(world.device, each, rows, F.cross_entropy) for each in wrapped
        )
        assert mine[0] == right[0], f"scales: {mine[0]}, should be {right[0]}"
        assert mine[0][3] < mine[0][2], f"no step has overflowed: {mine[0]}"
        far = [
            assert_near(p, q, "a parameter after the last step", 1e-3)
            for p, q in zip(mine[1][-1], right[1][-1], strict=True)
        ]
        figures[f"{n}_replicas"] = {"scales": mine[0], "far": max(far)}
    return figures


# ---- other ways to step -------------------------------------------------------------


def pair(world: World, build: Callable[[], nn.Module], n: int = 2) -> tuple[Any, Any]:
    """Return a wrapper and a plain module by hand, with the same parameters."""
    torch.manual_seed(1)
    module = build().to(world.device)
    return world.wrap(copy.deepcopy(module), n), ByHand(module, n)


def same_step(model: Any, by_hand: Any, x: Any, what: str = "") -> float:
    """Step both on an input; gradients must be near; return their distance."""
    for each in (model, by_hand):
        each.zero_grad()
        each(x).square().sum().backward()
    return assert_same_gradients(model, by_hand, what)


def same_outputs(model: Any, by_hand: Any, x: Tensor, what: str) -> Tensor:
    """Evaluate both with the same values; outputs must be near."""
    by_hand.module.load_state_dict(model.module.state_dict())
    with torch.no_grad():
        out: Tensor = model(x)
        assert_near(out, by_hand(x), what)
    return out


@check(worlds=(1,))
def one_device_is_as_torchs_class(world: World) -> dict[str, Any]:
    """Compare `device_ids=[0]` with torch.nn.DataParallel(device_ids=[0])."""
    if is_fake():
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


# ---- inputs -------------------------------------------------------------------------

LARGE = 4096  # rows: such inputs go through pinned memory


@check(worlds=(1,))
def inputs_on_the_cpu(world: World) -> dict[str, Any]:
    """Inputs of any size in pinned or other memory, which may change after the call."""
    model, by_hand = pair(world, smooth, 3)
    is_real = world.device.type == "cuda"
    figures = {}
    for n_rows, is_pinned in itertools.product((N_ROWS, LARGE), (False, is_real)):
        x = torch.randn(n_rows, 16, generator=world.generator(n_rows))
        right = by_hand(x.to(world.device))
        for number in range(3):
            given = x.pin_memory() if is_pinned else x.clone()
            out = model(given)
            assert out.device == world.device, f"the output is on {out.device}"
            if not is_pinned:
                given.zero_()
            assert_near(out, right, f"call {number} of {n_rows} rows")
        for each, output in ((model, out), (by_hand, right)):
            each.zero_grad()
            output.square().mean().backward()
        words = f"{n_rows}_rows{'_pinned' if is_pinned else ''}"
        figures[words] = assert_same_gradients(model, by_hand)
    return figures
