"""Take the same steps with replicas and with the plain module, and compare.

Compared with the plain module on each replica's rows in turn, only the addresses of
parameters differ, and so the kernels that torch's libraries choose.  Compared with the
plain module on the whole batch, shapes differ too.  Each step begins from the same
parameters, so differences do not grow.  Equality of bits is recorded, but not judged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from checks import is_quick
from replica_world import ByHand, World
from torch import Tensor, nn
from twins import Batch, Step, expect_near, pairs_of, same, sgd, take_steps

# The tolerance relative to a tensor's largest element, by dtype of gradients.
NEAR = {
    torch.float64: 1e-12,
    torch.float32: 5e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
WHOLE = 4  # factor on the tolerance for the module that takes all rows at once


def assert_near(
    mine: Tensor | None, right: Tensor | None, what: str, limit: float | None = None
) -> float:
    """Fail if ours is too far from the right value; return the distance."""
    return expect_near(mine, right, what, NEAR if limit is None else limit)


def assert_same_gradients(mine: nn.Module, right: nn.Module, what: str = "") -> float:
    """Fail if gradients of two modules differ too much; return the distance."""
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
    """Take the same steps with 2 and 3 replicas, by hand and with the plain module.

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
        found: dict[str, Any] = {"bits": same(mine, right)}
        found["far"] = max(
            assert_near(a, b, f"{n} replicas, {what}", limit)
            for a, b, what in pairs_of(mine, right, names)
        )
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
            allowed = WHOLE * max(NEAR[p.dtype] for p in plain.parameters())
            found["far_from_whole"] = max(
                assert_near(
                    a, b, f"{n} replicas beside the plain module, {what}", allowed
                )
                for a, b, what in pairs_of(mine, whole, names)
            )
        del model
        figures[f"{n}_replicas"] = found
    return figures


def evaluate(
    model: nn.Module, by_hand: nn.Module, batches: list[Batch], limit: float | None
) -> None:
    """Check that an evaluation uses the module's current weights and buffers."""
    modes = model.training, by_hand.training
    model.eval()
    by_hand.eval()
    with torch.no_grad():
        for x, _ in batches[:2]:
            assert_near(model(x), by_hand(x), "output of an evaluation", limit)
    model.train(modes[0])
    by_hand.train(modes[1])
