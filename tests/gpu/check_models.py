"""The models of the CPU benchmarks, trained in several ways, against torch DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import bench_models as models
import torch
from checks import Skip, add, check, is_fake, rehearsed
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision
from twins import (
    Batch,
    Step,
    assert_near,
    pairs_of,
    plain_step,
    play,
    scaled_steps,
    take_steps,
)
from world import World

N_STEPS = rehearsed(5, 4)  # the reducer learns its order in the first three


def small_transformer() -> nn.Module:
    """Make the benchmarks' transformer, but with two layers of width 32."""
    model = models.Transformer()
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, batch_first=True, norm_first=True
    )
    model.embedding, model.head = nn.Embedding(1000, 32), nn.Linear(32, 1000)
    model.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model


# Smaller models for a rehearsal.
SMALLER: dict[str, dict[str, Any]] = {
    "transformer": {"build": small_transformer},
    "resnet18": {"build": partial(models.build_resnet18, 8)},
    "mlp25m": {
        "build": partial(models.build_mlp, *[256] * 7),
        "make_batch": models.regression(32, 256),
    },
}


def spec_of(name: str) -> models.ModelSpec:
    """Return a model of the benchmarks, or a smaller one for a rehearsal."""
    smaller = SMALLER.get(name, {}) if is_fake() else {}
    return replace(models.BY_NAME[name], **smaller)


def batches_of(world: World, spec: models.ModelSpec, n: int = N_STEPS) -> list[Batch]:
    g = world.generator(7)
    return [spec.make_batch(g) for _ in range(n)]


def same(x: Any) -> Any:
    return x


def train(
    world: World,
    name: str,
    change: Callable[[nn.Module], nn.Module] = same,
    give: Callable[[Tensor], Tensor] = same,
    make_step: Callable[[models.ModelSpec], Step] = lambda spec: plain_step(spec.loss),
    **options: Any,
) -> dict[str, Any]:
    """Train a model, after changes of it and its inputs, with a kind of step."""
    spec = spec_of(name)
    if is_fake() and name == "mlp100m":
        raise Skip("too large for a rehearsal")
    rows = [(give(x), y) for x, y in batches_of(world, spec)]
    return play(world, lambda: change(spec.build()), rows, make_step(spec), **options)


# ---- kinds of steps -----------------------------------------------------------------


def autocast_step(spec: models.ModelSpec) -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
            loss = spec.loss(model(batch[0]), batch[1])
        loss.backward()

    return step


@check(worlds=(1, 2), needs_cuda=True)
def grad_scaler(world: World) -> dict[str, Any]:
    """fp16 with a GradScaler; on rank 0 a step overflows, and all ranks skip it."""
    spec = spec_of("digits")
    batches = batches_of(world, spec, 8)
    if world.rank == 0:
        batches[4] = (batches[4][0] * 1e30, batches[4][1])

    def train(wrap: Callable[[nn.Module], nn.Module]) -> Any:
        torch.manual_seed(1)
        return scaled_steps(world.device, wrap(spec.build()), batches, spec.loss)

    scales, theirs = train(world.theirs)
    our_scales, mine = train(world.ours)
    assert scales == our_scales, (scales, our_scales)
    assert scales[4] < scales[3], f"no step has overflowed: {scales}"
    assert len({tuple(row) for row in world.all(our_scales)}) == 1, "ranks disagree"
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        for p, q in zip(a, b, strict=True):
            assert torch.equal(p, q), f"parameters differ after step {number}"
    return {"scales": scales}


def make_fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with one kernel over all gradients, some of them views."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


# ---- options ------------------------------------------------------------------------


def with_options(world: World, name: str) -> dict[str, Any]:
    """Use small buckets, `device_ids`, and inputs on the CPU."""
    options: dict[str, Any] = {"bucket_cap_mb": rehearsed(1, 0.05)}
    if world.device.type == "cuda":
        options.update(device_ids=[0], output_device=0)
    wrappers = {
        "wrap_theirs": partial(world.theirs, **options),
        "wrap_ours": partial(world.ours, **options),
    }
    return train(world, name, inputs_stay=True, **wrappers)


def by_hand(world: World, spec: models.ModelSpec, sums: torch.dtype) -> Step:
    """Make a step of mixed precision without a wrapper: copies, then means."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        copies = {n: p.to(torch.bfloat16) for n, p in model.named_parameters()}
        x = batch[0].to(torch.bfloat16) if batch[0].is_floating_point() else batch[0]
        spec.loss(functional_call(model, copies, x), batch[1]).backward()
        for p in model.parameters():
            grad = p.grad.to(sums)  # type: ignore[union-attr]
            p.grad = world.mean(grad, grad).float()

    return step


def in_fewer_bits(
    world: World, name: str, sums: torch.dtype | None, **options: Any
) -> dict[str, Any]:
    """Compute in bfloat16 with copies of the parameters (`mixed_precision`).

    torch's class is no reference: the first step's gradients are garbage, and the
    transformer's attention gets none.
    """
    low = torch.bfloat16
    spec = spec_of(name)
    rows = [tuple(t.to(world.device) for t in row) for row in batches_of(world, spec)]
    torch.manual_seed(1)
    module = spec.build().to(world.device)
    other = copy.deepcopy(module)
    names = [n for n, _ in module.named_parameters()]
    precision = _MixedPrecision(low, sums, low)
    model = world.ours(module, mixed_precision=precision, **options)
    mine = take_steps(model, rows, plain_step(spec.loss))  # type: ignore[arg-type]
    for buffer in other.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.to(low)
    right = take_steps(other, rows, by_hand(world, spec, sums or low))  # type: ignore[arg-type]
    for a, b, what in pairs_of(mine, right, names):
        assert_near(a, b, True, what)
    return {"criterion": "bits"}


def of_type(dtype: torch.dtype) -> dict[str, Any]:
    return {"change": lambda m: m.to(dtype), "give": lambda x: x.to(dtype)}


LAST = {
    "change": lambda m: m.to(memory_format=torch.channels_last),
    "give": lambda x: x.contiguous(memory_format=torch.channels_last),
}
AUTOCAST = {"make_step": autocast_step}
VIEWS = {"sums": None, "gradient_as_bucket_view": True}
SMALL, TWO = (1, 2, 3), (1, 2)
ROWS: dict[str, tuple[Callable[..., Any], str, dict[str, Any], tuple[int, ...]]] = {
    "model_digits": (train, "digits", {}, SMALL),
    "model_small": (train, "small", {}, SMALL),
    "model_transformer": (train, "transformer", {}, SMALL),
    "model_resnet18": (train, "resnet18", {}, SMALL),
    "model_mlp25m": (train, "mlp25m", {}, TWO),
    "model_mlp100m": (train, "mlp100m", {}, TWO),
    "autocast_digits": (train, "digits", AUTOCAST, TWO),
    "autocast_transformer": (train, "transformer", AUTOCAST, TWO),
    "model_in_bf16": (train, "digits", of_type(torch.bfloat16), SMALL),
    "model_in_f64": (train, "digits", of_type(torch.float64), SMALL),
    "model_channels_last": (train, "resnet18", LAST, TWO),
    "model_with_options": (with_options, "transformer", {}, TWO),
    "fused_adam": (train, "transformer", {"make_optimizer": make_fused_adam}, TWO),
    "mixed_digits": (in_fewer_bits, "digits", {"sums": torch.float32}, TWO),
    "mixed_transformer": (in_fewer_bits, "transformer", {"sums": torch.bfloat16}, TWO),
    "mixed_resnet18": (in_fewer_bits, "resnet18", {"sums": torch.float32}, TWO),
    "mixed_views": (in_fewer_bits, "digits", VIEWS, TWO),
}
for _name, (_function, _model, _options, _worlds) in ROWS.items():
    _made = partial(_function, name=_model, **_options)
    add(globals(), _name, _made, worlds=_worlds, seconds=90)
