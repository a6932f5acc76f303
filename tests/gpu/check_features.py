"""Beside a step: SyncBatchNorm, collectives of the user, memory, one rank."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import bench_models as models
import paceline
import torch
import torch.distributed as dist
from check_gradients import (
    Leaves,
    coefficients_for,
    expect_means,
    good_steps,
    step_once,
)
from checks import Skip, check, rehearsed
from torch import nn
from torch.nn import functional as F
from twins import Batch, assert_near, plain_step, play
from world import World


@check(worlds=(2, 3), needs_cuda=True, seconds=90)
def sync_batch_norm(world: World) -> dict[str, Any]:
    """The user's NCCL collectives run inside forward and backward, beside ours."""

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for n_in in (3, 16, 16, 16):
            conv = nn.Conv2d(n_in, 16, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(16), nn.ReLU()]
        body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 10))
        return nn.SyncBatchNorm.convert_sync_batchnorm(body)

    g = world.generator(5)
    rows = [
        (torch.randn(4, 3, 8, 8, generator=g), torch.randint(10, (4,), generator=g))
        for _ in range(8)
    ]
    return play(world, build, rows, plain_step(F.cross_entropy))


@check(worlds=(2,), needs_cuda=True)
def collectives_of_the_user(world: World) -> None:
    """All-reduces of torch's group run between and inside backwards."""
    model = world.ours(Leaves([(10,), (300_000,)] * 4, [torch.float32]))
    for i, p in enumerate(model.parameters()):
        if i % 2:
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.detach()))
    for step in range(6):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        given = step_once(world, model, step)
        number = torch.ones(1000, device=world.device)
        dist.all_reduce(number)
        expect_means(world, model, list(given))
        assert float(number[0]) == world.size


@check(worlds=(1, 2))
def two_wrappers_in_turns(world: World) -> None:
    """A GAN's loop: two models, stepped in opposite order, one inside the other."""
    a = world.ours(Leaves([(10,), (90_000,)], [torch.float32]))
    b = world.ours(Leaves([(7,), (120_000,)], [torch.float32]))
    for step in range(6):
        first, second = (a, b) if step % 2 else (b, a)
        rows = [coefficients_for(world, m, step) for m in (first, second)]
        a.zero_grad()
        b.zero_grad()
        losses = [m(row) for m, row in zip((first, second), rows, strict=True)]
        (losses[0] + losses[1]).backward()
        for m, row in zip((first, second), rows, strict=True):
            expect_means(world, m, list(row))


def pairs(world: World, n: int) -> list[Batch]:
    return [
        (world.integers(8, 64, seed=i), world.integers(8, 64, seed=9 + i))
        for i in range(n)
    ]


@check(worlds=(1, 2), needs_cuda=True)
def from_the_cpu_and_back(world: World) -> None:
    """A model is wrapped, trained, moved to the CPU and back, and trains on."""
    model = world.ours(Leaves([(10,), (90_000,)], [torch.float32]))
    model(coefficients_for(world, model, 0)).backward()
    model.cpu()
    model.to(world.device)
    good_steps(world, model, range(4))


@check(worlds=(1, 2), seconds=90)
def nothing_is_left_behind(world: World) -> dict[str, Any]:
    """Wrappers that are made and dropped free their memory."""

    def use() -> None:
        width = rehearsed(5_000_000, 50_000)
        model = world.ours(Leaves([(width,)] * 4, [torch.float32]))
        for step in range(3):
            step_once(world, model, step)
        world.synchronize()

    taken = []
    for _ in range(4):
        use()
        gc.collect()
        world.meet()
        taken.append(world.taken())
        world.meet()
    lost = taken[-1] - taken[1]
    assert lost <= rehearsed(60 << 20, 0), f"after two more wrappers: {taken}"
    return {"lost": lost}


def used_as_plain(world: World, register: Any = None) -> Any:
    """Return a wrapper of one rank, as users get it, and its weight's gradient."""
    module = nn.Linear(10, 10).to(world.device)
    model = paceline.DistributedDataParallel(copy.deepcopy(module), device_ids=[0])
    if register is not None:
        model.register_comm_hook(None, register)
    x = world.integers(4, 10)
    model(x).sum().backward()
    module(x).sum().backward()
    return model, model.module.weight.grad, module.weight.grad


@check(worlds=(1,))
def the_module_of_one_rank(world: World) -> None:
    """A world of one rank needs no reducer: the wrapper acts as the plain module."""
    names = ("cuInit", "cuLaunchKernel")
    before = world.count_calls(*names)
    model, mine, right = used_as_plain(world)
    assert model._session.reducer is None
    assert world.count_calls(*names) == before
    assert_near(mine, right, True, "gradient")


@check(worlds=(1,))
def a_hook_of_one_rank(world: World) -> None:
    """It receives the gradients, and its results replace them, without NCCL."""

    def hook(state: Any, bucket: Any) -> Any:
        devices = [world.device] if world.device.type == "cuda" else []
        future = torch.futures.Future(devices=devices)
        future.set_result(bucket.buffer() * 2)
        return future

    _, mine, right = used_as_plain(world, hook)
    assert_near(mine, 2 * right, True, "gradient")


@check(worlds=(2,), needs_cuda=True)
def sharded_optimizer(world: World) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if not hasattr(torch.distributed, "optim"):
        raise Skip("this torch has none")

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
        )

    build = partial(models.build_mlp, 64, 64, 64)
    play(world, build, pairs(world, 4), plain_step(F.mse_loss), make_optimizer=make)
