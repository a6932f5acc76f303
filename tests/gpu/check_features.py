"""Other features of torch's class: join, buffers, SyncBatchNorm, copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import Batch, assert_near, plain_step, play
from world import World


@check(worlds=(1, 2, 3))
def join_with_uneven_batches(world: World) -> None:
    """A rank without batches counts as zeros; gradients are divided by all ranks."""
    module = Leaves([(10,), (90_000,)], [torch.float32])
    model = world.ours(module)
    n_batches = 6 - world.rank
    rows = [coefficients_for(world, model, step) for step in range(n_batches)]
    # All ranks' batches on each rank, for the means by hand.
    known = world.all([[c.cpu() for c in row] for row in rows])
    with model.join(divide_by_initial_world_size=True):
        for step, given in enumerate(rows):
            model.zero_grad()
            model(given).backward()
            for i, p in enumerate(model.parameters()):
                there = [r[step][i] for r in known if len(r) > step]
                right = sum(t.double() for t in there) / world.size
                right = right.float().to(world.device)
                assert_near(p.grad, right, world.size <= 2, f"step {step}")
    world.meet()


@check(worlds=(1, 2, 3))
def buffers_of_rank_0(world: World) -> None:
    module = nn.Sequential(nn.Linear(20, 500), nn.BatchNorm1d(500), nn.Linear(500, 1))
    model = world.ours(module)
    for step in range(4):
        model.zero_grad()
        x = torch.randn(16, 20, generator=world.generator(step)).to(world.device)
        model(x).square().mean().backward()
    model.eval()(x)  # copies rank 0's
    state = {k: v.cpu() for k, v in model.state_dict().items()}
    for other in world.all(state):
        for name in state:
            if "running" in name or "tracked" in name:
                assert torch.equal(other[name], state[name]), f"{name} differs"


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


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@check(worlds=(1, 2))
def both_kinds_of_checkpointing(world: World) -> None:
    for reentrant in (False, True):
        build = partial(Checkpointed, reentrant)
        play(world, build, pairs(world, 5), plain_step(F.mse_loss))


@check(worlds=(1, 2))
def copies_and_states(world: World) -> None:
    """A copy has the options of its original, and can train after that is dropped."""
    leaves = Leaves([(10,), (90_000,)], [torch.float32])
    model = world.ours(leaves, gradient_as_bucket_view=True)
    model(coefficients_for(world, model, 1)).backward()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for twin in twins:
        file.seek(0)
        twin.load_state_dict(torch.load(file, map_location=world.device))
        good_steps(world, twin, range(3))
        assert twin._session.options.as_bucket_views
        assert twin.device_ids == model.device_ids
    del model
    for twin in twins:
        good_steps(world, twin, (9,))


@check(worlds=(1, 2))
def parameters_frozen_and_converted(world: World) -> None:
    model = world.ours(Leaves([(10,), (90_000,)], [torch.float32]))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        good_steps(world, model, range(3))


@check(worlds=(1, 2), needs_cuda=True)
def from_the_cpu_and_back(world: World) -> None:
    """A model is wrapped, trained, moved to the CPU and back, and trains on."""
    model = world.ours(Leaves([(10,), (90_000,)], [torch.float32]))
    model(coefficients_for(world, model, 0)).backward()
    model.cpu()
    model.to(world.device)
    good_steps(world, model, range(4))


@check(worlds=(2,))
def parameters_of_rank_0(world: World) -> None:
    """At construction all ranks, with different values, receive rank 0's."""
    torch.manual_seed(world.rank)
    module = nn.Sequential(nn.Linear(100, 2000), nn.BatchNorm1d(2000))
    model = world.ours(module)
    state = {k: v.cpu() for k, v in model.state_dict().items()}
    for other in world.all(state):
        for name, value in state.items():
            assert torch.equal(other[name], value), f"{name} differs"


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
