"""Take the same steps with torch's class and with ours, and compare gradients.

Sums of two ranks commute, and a mean of two is exact.  So gradients have the same bits
if torch's own kernels give the same bits twice, which is tried first.  With three ranks
the order of NCCL's sums depends on ring and chunk, and 1/3 is rounded: differences are
a few units in the last place.  Training would let them grow, so with three ranks each
step begins from torch's parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from world import World

# The tolerance relative to a gradient's largest element, by dtype of its sum.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}

Batch = tuple[Tensor, Tensor]
Step = Callable[[nn.Module, torch.optim.Optimizer, Batch], Any]


@dataclass(frozen=True)
class Outcome:
    """The results of steps: the gradients of each, the parameters at the end."""

    gradients: list[list[Tensor | None]]
    parameters: list[Tensor]


def equal(a: Tensor, b: Tensor) -> bool:
    """Tell whether bits are equal, where NaNs are equal, and 0.0 equals -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = dense(a), dense(b)
    same = a == b
    if a.is_floating_point() or a.is_complex():
        same = same | (a.isnan() & b.isnan())
    return bool(same.all())


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def expect_near(
    mine: Tensor | None,
    right: Tensor | None,
    what: str,
    limits: float | Mapping[torch.dtype, float],
) -> float:
    """Fail unless both are None or near; return the largest relative distance."""
    if mine is None or right is None:
        assert mine is right, f"{what}: ours is {mine}, and should be {right}"
        return 0.0
    for name in ("dtype", "shape", "layout"):
        ours, theirs = getattr(mine, name), getattr(right, name)
        assert ours == theirs, f"{what}: {name} {ours}, not {theirs}"
    if not mine.numel():
        return 0.0
    mine, right = dense(mine.detach()), dense(right.detach())
    limit = limits if isinstance(limits, float) else limits[mine.dtype]
    scale = right.abs().max().clamp_min(torch.finfo(right.dtype).tiny)
    far = float(((mine - right).abs().max() / scale).item())  # NaN if there is one
    assert far <= limit, f"{what} is {far:.3g} of the largest away, {limit} allowed"
    return far


def assert_near(
    mine: Tensor | None, theirs: Tensor | None, exact: bool, what: str
) -> None:
    """Fail unless both are None, have the same bits, or are near enough."""
    if mine is not None and theirs is not None and equal(mine, theirs):
        return
    far = expect_near(mine, theirs, what, float("inf") if exact else TOLERANCE)
    assert mine is None or not exact, f"{what}: not the same bits, but {far:.3g} away"


def plain_step(loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()

    return step


def sgd(model: nn.Module, rate: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def take_steps(
    model: nn.Module,
    batches: list[Batch],
    step: Step,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    teacher: Outcome | None = None,
) -> Outcome:
    """Train, and keep a copy of each gradient after each backward.

    With a teacher, the optimizer uses the teacher's gradients, so that differences do
    not grow from step to step.
    """
    optimizer = make_optimizer(model)
    gradients = []
    for number, batch in enumerate(batches):
        step(model, optimizer, batch)
        found = [p.grad for p in model.parameters()]
        gradients.append([None if g is None else g.detach().clone() for g in found])
        if teacher is not None:
            for mine, right in zip(found, teacher.gradients[number], strict=True):
                if mine is not None and right is not None:
                    mine.copy_(right)
        optimizer.step()
    return Outcome(gradients, [p.detach().clone() for p in model.parameters()])


def scaled_steps(
    device: torch.device, model: nn.Module, batches: list[Batch], loss: Any
) -> tuple[list[float], list[list[Tensor]]]:
    """Train in float16 with a GradScaler; return each step's scale and parameters."""
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    optimizer = sgd(model)
    scales, rows = [], []
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            output = model(x.to(device))
        scaler.scale(loss(output.float(), y.to(device))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        rows.append([p.detach().clone() for p in model.parameters()])
    return scales, rows


def pairs_of(
    mine: Outcome, right: Outcome, names: list[str]
) -> Iterator[tuple[Tensor | None, Tensor | None, str]]:
    """Yield the pairs of gradients and parameters of two outcomes, with names."""
    steps = zip(mine.gradients, right.gradients, strict=True)
    for number, (ours, theirs) in enumerate(steps, 1):
        for name, a, b in zip(names, ours, theirs, strict=True):
            yield a, b, f"step {number}, gradient of {name}"
    for name, a, b in zip(names, mine.parameters, right.parameters, strict=True):
        yield a, b, f"{name} at the end"


def same(a: Outcome, b: Outcome) -> bool:
    rows = zip([*a.gradients, a.parameters], [*b.gradients, b.parameters], strict=True)
    return all(
        x is y if x is None or y is None else equal(x, y)
        for left, right in rows
        for x, y in zip(left, right, strict=True)
    )


def play(
    world: World,
    build: Callable[[], nn.Module],
    batches: list[Batch],
    step: Step,
    *,
    wrap_theirs: Callable[[nn.Module], nn.Module] | None = None,
    wrap_ours: Callable[[nn.Module], nn.Module] | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    inputs_stay: bool = False,
) -> dict[str, Any]:
    """Take the same steps with torch's class, twice, and with ours; compare.

    Inputs are moved to the device, or stay on the CPU for the wrappers to move.  On up
    to 2 ranks, bits must be equal if they are in both of torch's runs.
    """
    torch.manual_seed(1)
    module = build().to(world.device)
    where = torch.device("cpu") if inputs_stay else world.device
    batches = [(x.to(where), y.to(world.device)) for x, y in batches]
    names = [name for name, _ in module.named_parameters()]
    theirs = []
    for _ in range(2):
        torch.manual_seed(2 + world.rank)
        model = (wrap_theirs or world.theirs)(copy.deepcopy(module))
        theirs.append(take_steps(model, batches, step, make_optimizer))
        del model
    torch.manual_seed(2 + world.rank)
    model = (wrap_ours or world.ours)(copy.deepcopy(module))
    repeats = all(world.all(same(*theirs)))
    exact = repeats and world.size <= 2
    teacher = None if exact else theirs[0]
    mine = take_steps(model, batches, step, make_optimizer, teacher)
    for a, b, what in pairs_of(mine, theirs[0], names):
        assert_near(a, b, exact, what)
    return {"criterion": "bits" if exact else "tolerance", "torch_repeats": repeats}
