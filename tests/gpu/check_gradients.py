"""Gradients that are whole numbers: results must equal the mean bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from checks import check, is_fake, rehearsed
from torch import Tensor, nn
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
