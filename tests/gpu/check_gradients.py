"""Gradients that are whole numbers: results must equal the mean bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from checks import check, is_fake, rehearsed
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from twins import TOLERANCE, assert_near, equal
from world import World


class Leaves(nn.Module):
    """Parameters whose gradients are the coefficients that forward receives."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtypes: list[torch.dtype]
    ) -> None:
        super().__init__()
        self.leaves = nn.ParameterList(
            nn.Parameter(torch.ones(shape, dtype=dtype))
            for dtype in dtypes
            for shape in shapes
        )

    def forward(self, coefficients: list[Tensor | None]) -> Tensor:
        """Sum the products; a coefficient of None leaves its parameter out."""
        total = torch.zeros((), dtype=torch.float64, device=self.leaves[0].device)
        pairs = zip(self.leaves, coefficients, strict=True)
        for leaf, coefficient in pairs:
            if coefficient is not None:
                product = (leaf * coefficient).sum()
                product = product.real if product.is_complex() else product
                total = total + product.double()
        return total


def coefficients_for(world: World, model: nn.Module, seed: int) -> list[Tensor]:
    """Return integers, multiples of the world size, different on each rank."""
    g = world.generator(seed)
    found = []
    for p in model.parameters():
        wide = torch.randint(-3, 4, p.shape, generator=g) * world.size
        found.append(wide.to(p.dtype).to(world.device))
    return found


ODD_SHAPES = [(1,), (3,), (2, 2), (7,), (63,), (64,), (65,), (255, 3), (1023,), (4097,)]
LARGE_SHAPES = rehearsed(
    [(1 << 20,), (300_001,), (1000, 700)], [(1 << 15,), (30_001,), (100, 70)]
)
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def expect_means(
    world: World, model: nn.Module, given: Sequence[Tensor | None]
) -> None:
    """Fail unless each gradient is the mean of the ranks' coefficients.

    NCCL multiplies by 1 / n as it sums, which is exact for one rank and for two.
    """
    few = world.size <= 2
    parameters = list(model.parameters())
    mine = [c.conj() if c is not None else None for c in given]
    rows = zip(parameters, world.means(mine, parameters), strict=True)
    for number, (p, right) in enumerate(rows):
        what = f"parameter {number}, {p.dtype} of shape {tuple(p.shape)}"
        if few or (is_fake() and p.dtype.itemsize > 2):
            assert_near(p.grad, right, True, what)
        else:
            assert p.grad is not None, what
            near = TOLERANCE[p.dtype]  # of the terms, whose size is up to 3 times that
            torch.testing.assert_close(
                p.grad,
                right,
                rtol=near,
                atol=near * 3 * world.size,
                msg=lambda m, w=what: f"{w}: {m}",
            )


def step_once(world: World, model: nn.Module, step: int) -> list[Tensor]:
    given = coefficients_for(world, model, step)
    model.zero_grad()
    model(given).backward()
    return given


def good_steps(world: World, model: nn.Module, steps: Iterable[int]) -> None:
    """Take steps, expect means; each number in `steps` seeds new coefficients."""
    for step in steps:
        expect_means(world, model, step_once(world, model, step))


@check(worlds=(1, 2, 3), seconds=90)
def sizes_and_types(world: World) -> None:
    for dtypes in ([torch.float32], FLOATS):
        model = world.ours(Leaves(ODD_SHAPES + LARGE_SHAPES, dtypes))
        good_steps(world, model, range(5))


@check(worlds=(1, 2))
def complex_numbers(world: World) -> None:
    model = world.ours(Leaves([(5,), (3000,)], [torch.complex64, torch.complex128]))
    good_steps(world, model, range(4))


@check(worlds=(1, 2))
def two_thousand_tensors(world: World) -> None:
    model = world.ours(Leaves([(n % 97 + 1,) for n in range(2000)], [torch.float32]))
    for step in range(4):
        given = step_once(world, model, step)
        mine = torch.cat([p.grad.flatten() for p in model.parameters()])
        right = world.mean(torch.cat([c.flatten() for c in given]), mine)
        assert equal(mine, right), f"step {step}"


@check(worlds=(1, 2, 3))
def infinities_and_no_numbers(world: World) -> None:
    model = world.ours(Leaves([(100,), (70_000,)], [torch.float32, torch.bfloat16]))
    for step in range(4):
        given = coefficients_for(world, model, step)
        for c in given:
            c[step] = float("nan") if world.rank == 0 else 1.0
            c[step + 20] = float("inf")
            c[step + 40] = float("-inf") if world.rank == world.size - 1 else 0.0
        model.zero_grad()
        model(given).backward()
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad[step].isnan(), "a NaN was lost"
            assert p.grad[step + 20] == float("inf")
            assert p.grad[step + 40] == float("-inf")
            assert int((~p.grad.isfinite()).sum()) == 3


@check(worlds=(1, 2, 3), seconds=90)
def unused_parameters(world: World) -> None:
    model = world.ours(Leaves([(9,), (80_000,)] * 6, [torch.float32]))
    parameters = list(model.parameters())
    for step in range(8):
        given: list[Tensor | None] = list(coefficients_for(world, model, step))
        for number in range(len(given)):
            used_by_none = number == 11
            if used_by_none or (number + step + world.rank) % 3 == 0:
                given[number] = None
        model.zero_grad()
        model(given).backward()
        used = world.all([c is not None for c in given])
        means = world.means(given, parameters)
        for number, (p, mean) in enumerate(zip(parameters, means, strict=True)):
            right = mean if any(row[number] for row in used) else None
            exact = world.size <= 2
            assert_near(p.grad, right, exact, f"step {step}, parameter {number}")


@check(worlds=(1, 2))
def accumulation_and_no_sync(world: World) -> None:
    model = world.ours(Leaves([(10,), (90_000,)], [torch.float32, torch.float16]))
    for step in range(5):
        model.zero_grad(set_to_none=step % 2 == 0)
        rows = [coefficients_for(world, model, 10 * step + i) for i in range(3)]
        for i, given in enumerate(rows):
            with model.no_sync() if i < 2 else contextlib.nullcontext():
                model(given).backward()
        expect_means(world, model, [sum(cs) for cs in zip(*rows, strict=True)])


@check(worlds=(1, 2))
def gradients_on_top_of_means(world: World) -> None:
    """Without zero_grad(), a second mean is added to the first, as in torch."""
    model = world.ours(Leaves([(10,), (90_000,)], [torch.float32]))
    total: list[Tensor] = []
    for step in range(4):
        given = coefficients_for(world, model, step)
        model(given).backward()
        means = world.means(given, given)
        total = [a + b for a, b in zip(total, means, strict=True)] if total else means
        for p, right in zip(model.parameters(), total, strict=True):
            assert_near(p.grad, right, True, f"step {step}")


@check(worlds=(1, 2))
def kept_gradients(world: World) -> None:
    """Gradients that a program holds are not overwritten, in any kind of memory."""
    model = world.ours(Leaves([(10,), (90_000,), LARGE_SHAPES[0]], [torch.float32]))
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(8):
        given = step_once(world, model, step)
        for p in model.parameters():
            assert p.grad is not None
            if step % 3 != 2:
                kept.append((p.grad, p.grad.clone()))
        expect_means(world, model, list(given))
        for number, (grad, copy) in enumerate(kept):
            assert equal(grad, copy), f"step {step}: kept gradient {number} changed"
        if step == 5:
            kept.clear()


@check(worlds=(1, 2), seconds=90)
def gradients_dropped_at_once(world: World) -> None:
    """The allocator reuses freed gradients, on this stream and on others."""
    large = [(rehearsed(700_000, 70_000),)] * 3
    model = world.ours(Leaves([(50_000,)] * 20 + large, [torch.float32]))
    for step in range(rehearsed(30, 5)):
        given = step_once(world, model, step)
        copies = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        noise = [torch.full((50_000,), float("nan"), device=world.device)] * 20
        del noise
        for mine, right in zip(copies, world.means(given, given), strict=True):
            assert_near(mine, right, True, f"step {step}")


@check(worlds=(1, 2))
def sums_in_float32(world: World) -> None:
    """16-bit gradients are averaged in float32, and rounded once."""
    shapes = [(33,), (5000,), (100_001,)]
    module = Leaves(shapes, [torch.bfloat16, torch.float16])
    wide = _MixedPrecision(reduce_dtype=torch.float32)
    model = world.ours(module, mixed_precision=wide)
    g = world.generator(3)
    for _ in range(4):
        given = [
            torch.randn(p.shape, generator=g).to(p.dtype).to(world.device)
            for p in model.parameters()
        ]
        model.zero_grad()
        model(given).backward()
        for p, c in zip(model.parameters(), given, strict=True):
            rows = [r.float() for r in world.all(c.cpu())]
            total = rows[0]
            for row in rows[1:]:
                total = total + row
            right = (total / world.size).to(p.dtype).to(world.device)
            assert p.grad is not None
            assert_near(p.grad, right, True, f"{p.dtype} of {tuple(p.shape)}")
