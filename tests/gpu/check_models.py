"""The models of the CPU benchmarks and ways to train them, against torch DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from checks import Check, Skip, is_rehearsal
from paceline._cli.bench import models
from torch import nn
from twins import Batch, Step, plain_step, play
from world import World

N_STEPS = 5  # the order is learned in the first three


def batches_of(world: World, spec: models.ModelSpec, n: int = N_STEPS) -> list[Batch]:
    g = world.generator(7)
    return [spec.make_batch(g) for _ in range(n)]


def train(name: str, world: World) -> dict[str, Any]:
    spec = models.BY_NAME[name]
    if is_rehearsal() and name == "mlp100m":
        raise Skip("too large for a rehearsal")
    return play(world, spec.build, batches_of(world, spec), plain_step(spec.loss))


def _named(name: str, function: Callable[..., Any], **options: Any) -> Check:
    function.__name__ = name  # type: ignore[attr-defined]
    function.__module__ = __name__
    return Check(function, **options)


def _of_model(name: str, worlds: tuple[int, ...], seconds: float) -> Check:
    return _named(f"model_{name}", partial(train, name), worlds=worlds, seconds=seconds)


model_digits = _of_model("digits", (1, 2, 3), 60)
model_small = _of_model("small", (1, 2, 3), 60)
model_transformer = _of_model("transformer", (1, 2, 3), 60)
model_resnet18 = _of_model("resnet18", (1, 2, 3), 90)
model_mlp25m = _of_model("mlp25m", (1, 2), 90)
model_mlp100m = _of_model("mlp100m", (1, 2), 120)


# ---- mixed precision ----------------------------------------------------------------


def autocast_step(spec: models.ModelSpec, device: str, dtype: torch.dtype) -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            loss = spec.loss(model(batch[0]), batch[1])
        loss.backward()

    return step


def autocast_bf16(world: World, name: str) -> dict[str, Any]:
    spec = models.BY_NAME[name]
    step = autocast_step(spec, world.device.type, torch.bfloat16)
    return play(world, spec.build, batches_of(world, spec), step)


autocast_digits = _named(
    "autocast_digits", partial(autocast_bf16, name="digits"), worlds=(1, 2)
)
autocast_transformer = _named(
    "autocast_transformer", partial(autocast_bf16, name="transformer"), worlds=(1, 2)
)


def _scaled(world: World) -> dict[str, Any]:
    """fp16 with a GradScaler; on rank 0 a step overflows, and all ranks skip it."""
    spec = models.BY_NAME["digits"]
    batches = batches_of(world, spec, 8)
    if world.rank == 0:
        batches[4] = (batches[4][0] * 1e30, batches[4][1])
    scales: list[list[float]] = []

    def train(model: nn.Module) -> list[list[torch.Tensor]]:
        scaler = torch.amp.GradScaler(world.device.type, init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        seen, rows = [], []
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast(world.device.type, torch.float16):
                loss = spec.loss(model(x.to(world.device)), y.to(world.device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
            rows.append([p.detach().clone() for p in model.parameters()])
        scales.append(seen)
        return rows

    def build() -> nn.Module:
        torch.manual_seed(1)
        return spec.build()

    theirs, mine = train(world.theirs(build())), train(world.ours(build()))
    assert scales[0] == scales[1], scales
    assert scales[0][4] < scales[0][3], f"no step has overflowed: {scales[0]}"
    assert len({tuple(row) for row in world.all(scales[1])}) == 1, "ranks disagree"
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        for p, q in zip(a, b, strict=True):
            assert torch.equal(p, q), f"parameters differ after step {number}"
    return {"scales": scales[0]}


grad_scaler = _named("grad_scaler", _scaled, worlds=(1, 2), needs_cuda=True)


# ---- how a model is given -----------------------------------------------------------


def _half_model(world: World, dtype: torch.dtype) -> dict[str, Any]:
    spec = models.BY_NAME["digits"]
    rows = [(x.to(dtype), y) for x, y in batches_of(world, spec)]
    return play(world, lambda: spec.build().to(dtype), rows, plain_step(spec.loss))


model_in_bf16 = _named(
    "model_in_bf16", partial(_half_model, dtype=torch.bfloat16), worlds=(1, 2, 3)
)
model_in_f64 = _named(
    "model_in_f64", partial(_half_model, dtype=torch.float64), worlds=(1, 2, 3)
)


def _channels_last(world: World) -> dict[str, Any]:
    spec = models.BY_NAME["resnet18"]

    def build() -> nn.Module:
        return models.build_resnet18(16).to(memory_format=torch.channels_last)

    def last(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    rows = [(last(x), y) for x, y in batches_of(world, spec)]
    return play(world, build, rows, plain_step(spec.loss))


model_channels_last = _named("model_channels_last", _channels_last, worlds=(1, 2))


def _with_options(world: World) -> dict[str, Any]:
    """Small buckets, `device_ids`, inputs that come from the CPU."""
    spec = models.BY_NAME["transformer"]
    options: dict[str, Any] = {"bucket_cap_mb": 1}
    if world.device.type == "cuda":
        options.update(device_ids=[0], output_device=0)
    return play(
        world,
        spec.build,
        batches_of(world, spec),
        plain_step(spec.loss),
        wrap_theirs=partial(world.theirs, **options),
        wrap_ours=partial(world.ours, **options),
        inputs_stay=True,
    )


model_with_options = _named("model_with_options", _with_options, worlds=(1, 2))


def _fused_adam(world: World) -> dict[str, Any]:
    """An optimizer of one kernel over all gradients, some of them views."""
    spec = models.BY_NAME["transformer"]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    step = plain_step(spec.loss)
    return play(world, spec.build, batches_of(world, spec), step, make_optimizer=make)


fused_adam = _named("fused_adam", _fused_adam, worlds=(1, 2))


def _half_hook(world: World) -> dict[str, Any]:
    """torch's own hook that sends float16, registered with both."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    spec = models.BY_NAME["digits"]

    def with_hook(wrap: Callable[[nn.Module], Any]) -> Callable[[nn.Module], nn.Module]:
        def wrapped(module: nn.Module) -> nn.Module:
            model = wrap(module)
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
            return model

        return wrapped

    return play(
        world,
        spec.build,
        batches_of(world, spec),
        plain_step(spec.loss),
        wrap_theirs=with_hook(world.theirs),
        wrap_ours=with_hook(world.ours),
    )


half_hook = _named("half_hook", _half_hook, worlds=(1, 2))
