"""What else torch's class does: join, buffers, SyncBatchNorm, copies, checkpointing."""

from __future__ import annotations

import copy
import io
from typing import Any

import paceline
import torch
import torch.distributed as dist
from check_gradients import Leaves, coefficients_for, expect_means
from checks import Skip, check
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import assert_near, plain_step, play
from world import World


@check(worlds=(1, 2, 3))
def join_with_uneven_batches(world: World) -> None:
    """A rank without batches counts with zeros; gradients are divided by all."""
    module = Leaves([(10,), (90_000,)], [torch.float32])
    model = world.ours(module)
    n_batches = 6 - world.rank
    rows = [coefficients_for(world, model, step) for step in range(n_batches)]
    # Everybody's batches, known to all, for the means by hand.
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
    model.eval()(x)  # which brings rank 0's
    state = {k: v.cpu() for k, v in model.state_dict().items()}
    for other in world.all(state):
        for name in state:
            if "running" in name or "tracked" in name:
                assert torch.equal(other[name], state[name]), f"{name} differs"


@check(worlds=(2, 3), needs_cuda=True, seconds=90)
def sync_batch_norm(world: World) -> dict[str, Any]:
    """The user's own NCCL collectives, inside forward and backward, beside ours."""

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
    """All-reduces of torch's group between and inside backwards."""
    model = world.ours(Leaves([(10,), (300_000,)] * 4, [torch.float32]))
    for i, p in enumerate(model.parameters()):
        if i % 2:
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.detach()))
    for step in range(6):
        given = coefficients_for(world, model, step)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        model.zero_grad()
        model(given).backward()
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


class Checkpointed(nn.Module):
    """Blocks that are computed anew in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Four blocks."""
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@check(worlds=(1, 2))
def both_kinds_of_checkpointing(world: World) -> None:
    for reentrant in (False, True):
        rows = [
            (world.integers(8, 64, seed=n), world.integers(8, 64, seed=9 + n))
            for n in range(5)
        ]
        play(
            world,
            lambda reentrant=reentrant: Checkpointed(reentrant),
            rows,
            plain_step(F.mse_loss),
        )


@check(worlds=(1, 2))
def copies_and_states(world: World) -> None:
    model = world.ours(Leaves([(10,), (90_000,)], [torch.float32]))
    given = coefficients_for(world, model, 1)
    model(given).backward()
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, map_location=world.device))
    for step in range(3):
        given = coefficients_for(world, twin, step)
        twin.zero_grad()
        twin(given).backward()
        expect_means(world, twin, list(given))
    del model
    given = coefficients_for(world, twin, 9)
    twin.zero_grad()
    twin(given).backward()
    expect_means(world, twin, list(given))


@check(worlds=(1, 2))
def parameters_frozen_and_converted(world: World) -> None:
    model = world.ours(Leaves([(10,), (90_000,)], [torch.float32]))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        for step in range(3):
            given = coefficients_for(world, model, step)
            model.zero_grad()
            model(given).backward()
            expect_means(world, model, list(given))


@check(worlds=(1, 2), needs_cuda=True)
def from_the_cpu_and_back(world: World) -> None:
    """Wrapped, trained, moved to the CPU and back: it goes on where it is."""
    model = world.ours(Leaves([(10,), (90_000,)], [torch.float32]))
    given = coefficients_for(world, model, 0)
    model(given).backward()
    model.cpu()
    model.to(world.device)
    for step in range(4):
        given = coefficients_for(world, model, step)
        model.zero_grad()
        model(given).backward()
        expect_means(world, model, list(given))


@check(worlds=(2,))
def parameters_of_rank_0(world: World) -> None:
    """At construction; the ranks' own values are other ones."""
    torch.manual_seed(world.rank)
    module = nn.Sequential(nn.Linear(100, 2000), nn.BatchNorm1d(2000))
    model = world.ours(module)
    state = {k: v.cpu() for k, v in model.state_dict().items()}
    for other in world.all(state):
        for name, value in state.items():
            assert torch.equal(other[name], value), f"{name} differs"


@check(worlds=(1, 2), seconds=90, needs_cuda=True)
def nothing_is_left_behind(world: World) -> dict[str, Any]:
    """Wrappers that are made and dropped give their memory back."""

    def use() -> None:
        model = world.ours(Leaves([(5_000_000,)] * 4, [torch.float32]))
        for step in range(3):
            model.zero_grad()
            model(coefficients_for(world, model, step)).backward()
        world.synchronize()

    free = []
    for _ in range(4):
        use()
        torch.cuda.empty_cache()
        world.meet()
        free.append(torch.cuda.mem_get_info()[0])
        world.meet()
    lost = (free[1] - free[-1]) / 2**20
    assert lost < 60, f"{lost:.0f} MiB are gone after two more wrappers: {free}"
    return {"lost_mib": round(lost, 1)}


@check(worlds=(1,))
def the_module_of_one_rank(world: World) -> None:
    """A world of one needs no reducer: the wrapper is the plain module."""
    module = nn.Linear(10, 10).to(world.device)
    plain = copy.deepcopy(module)
    model = paceline.DistributedDataParallel(module)
    x = world.integers(4, 10)
    model(x).sum().backward()
    plain(x).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_near(p.grad, q.grad, True, "gradient")


@check(worlds=(2,), needs_cuda=True)
def sharded_optimizer(world: World) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if not hasattr(torch.distributed, "optim"):
        raise Skip("this torch has none")

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
        )

    rows = [
        (world.integers(8, 64, seed=n), world.integers(8, 64, seed=9 + n))
        for n in range(4)
    ]
    play(
        world,
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
        rows,
        plain_step(F.mse_loss),
        make_optimizer=make,
    )
