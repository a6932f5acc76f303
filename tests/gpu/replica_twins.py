"""The same steps by replicas, and by the plain module: what must be near what.

Beside the plain module on each replica's rows in turn, all that differs is where
parameters lie, and by that which kernels torch's libraries take; beside the plain
module on the whole batch also the shapes.  Each step begins from the same parameters,
so differences do not grow.  Whether bits are equal is written down, and not judged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from checks import is_quick
from replica_world import ByHand, World
from torch import Tensor, nn
from twins import Batch, Outcome, Step, distance, same, sgd, take_steps

# Of the largest element of a tensor, for each type in which gradients are.
NEAR = {
    torch.float64: 1e-12,
    torch.float32: 5e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
WHOLE = 4  # times as far may be the module that takes all rows at once


def assert_near(
    mine: Tensor | None, right: Tensor | None, what: str, limit: float | None = None
) -> float:
    """Fail where ours is too far from what is right; return how far it is."""
    if mine is None or right is None:
        assert mine is right, f"{what}: ours is {mine}, and should be {right}"
        return 0.0
    assert mine.dtype == right.dtype, f"{what}: {mine.dtype}, not {right.dtype}"
    assert mine.shape == right.shape, f"{what}: {mine.shape}, not {right.shape}"
    mine, right = mine.detach(), right.detach()
    if mine.is_sparse or right.is_sparse:
        assert mine.layout == right.layout, f"{what}: {mine.layout}, {right.layout}"
        mine, right = mine.to_dense(), right.to_dense()
    limit = NEAR[mine.dtype] if limit is None else limit
    far = distance(mine, right)
    assert far <= limit, f"{what} is {far:.3g} of the largest away, {limit} allowed"
    return far


def assert_same_gradients(mine: nn.Module, right: nn.Module, what: str = "") -> float:
    """Fail where gradients of two modules differ; return how far they are."""
    far = 0.0
    ours = _bare(mine).named_parameters()
    theirs = _bare(right).named_parameters()
    for (name, p), (_, q) in zip(ours, theirs, strict=True):
        far = max(far, assert_near(p.grad, q.grad, f"{what} gradient of {name}"))
    return far


def _bare(model: nn.Module) -> nn.Module:
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module)
    return inner


def distance_of(
    mine: Outcome, right: Outcome, names: list[str], limit: float | None, what: str
) -> float:
    """Fail at the first gradient that is too far; return how far the farthest is."""
    far = 0.0
    steps = zip(mine.gradients, right.gradients, strict=True)
    for number, (ours, theirs) in enumerate(steps, 1):
        for name, a, b in zip(names, ours, theirs, strict=True):
            words = f"{what}, step {number}, gradient of {name}"
            far = max(far, assert_near(a, b, words, limit))
    for name, a, b in zip(names, mine.parameters, right.parameters, strict=True):
        far = max(far, assert_near(a, b, f"{what}, {name} at the end", limit))
    return far


def play(
    world: World,
    build: Callable[[], nn.Module],
    batches: list[Batch],
    step: Step,
    *,
    limit: float | None = None,
    has_whole: bool = True,
    is_evaluated: bool = True,
) -> dict[str, Any]:
    """Take the same steps by 2 and by 3 replicas, by hand and by the plain module.

    After training, an evaluation must see the new weights and buffers.
    """
    torch.manual_seed(1)
    module = build().to(world.device)
    batches = [(x.to(world.device), y.to(world.device)) for x, y in batches]
    names = [name for name, _ in module.named_parameters()]
    figures: dict[str, Any] = {}
    for n in (2,) if is_quick() else (2, 3):
        by_hand = ByHand(copy.deepcopy(module), n)
        model = world.wrap(copy.deepcopy(module), n)
        right = take_steps(by_hand, batches, step)
        mine = take_steps(model, batches, step, sgd, right)
        found = {"bits": same_dense(mine, right)}
        found["far"] = distance_of(mine, right, names, limit, f"{n} replicas")
        ours, theirs = _bare(model).named_buffers(), by_hand.module.named_buffers()
        for (name, a), (_, b) in zip(ours, theirs, strict=True):
            if a.is_floating_point():
                assert_near(a, b, f"{n} replicas, buffer {name}", limit)
            else:
                assert torch.equal(a, b), f"{n} replicas, buffer {name}: {a}, not {b}"
        if is_evaluated:
            evaluate(model, by_hand, batches, limit)
        if has_whole:
            plain = copy.deepcopy(module)
            whole = take_steps(plain, batches, step, sgd, right)
            far = WHOLE * max(NEAR[p.dtype] for p in plain.parameters())
            found["far_from_whole"] = distance_of(
                mine, whole, names, far, f"{n} replicas beside the plain module"
            )
        del model
        figures[f"{n}_replicas"] = found
    return figures


def same_dense(a: Outcome, b: Outcome) -> bool:
    """Whether two outcomes have the same bits, sparse gradients made dense."""

    def dense(of: Outcome) -> Outcome:
        rows = [
            [g.to_dense() if g is not None and g.is_sparse else g for g in row]
            for row in of.gradients
        ]
        return Outcome(rows, of.parameters)

    return same(dense(a), dense(b))


def evaluate(
    model: nn.Module, by_hand: nn.Module, batches: list[Batch], limit: float | None
) -> None:
    """Outputs of an evaluation must be those of the module as it now is."""
    modes = model.training, by_hand.training
    model.eval()
    by_hand.eval()
    with torch.no_grad():
        for x, _ in batches[:2]:
            assert_near(model(x), by_hand(x), "output of an evaluation", limit)
    model.train(modes[0])
    by_hand.train(modes[1])
