"""Inputs and outputs of replicas on one GPU: their devices and their forms."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from check_replicas import N_ROWS, pair, smooth
from checks import check
from replica_twins import assert_near, assert_same_gradients
from replica_world import World
from torch import Tensor, nn


def take_gradients(module: nn.Module) -> list[Tensor]:
    """Return a module's gradients and clear them."""
    found = [p.grad for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


def near_gradients(
    mine: list[Tensor], module: nn.Module, what: str, limit: float | None = None
) -> list[float]:
    """Fail if gradients are too far from a module's; return their distances."""
    pairs = zip(mine, module.parameters(), strict=True)
    return [assert_near(grad, p.grad, what, limit) for grad, p in pairs]


LARGE = 4096  # rows: such inputs go through pinned memory


@check(worlds=(1,))
def inputs_on_the_cpu(world: World) -> dict[str, Any]:
    """Inputs of any size in pinned or other memory, which may change after the call."""
    model, by_hand = pair(world, smooth, 3)
    is_real = world.device.type == "cuda"
    figures = {}
    for n_rows, is_pinned in itertools.product((N_ROWS, LARGE), (False, is_real)):
        x = torch.randn(n_rows, 16, generator=world.generator(n_rows))
        right = by_hand(x.to(world.device))
        for number in range(3):
            given = x.pin_memory() if is_pinned else x.clone()
            out = model(given)
            assert out.device == world.device, f"the output is on {out.device}"
            if not is_pinned:
                given.zero_()
            assert_near(out, right, f"call {number} of {n_rows} rows")
        for each, output in ((model, out), (by_hand, right)):
            each.zero_grad()
            output.square().mean().backward()
        words = f"{n_rows}_rows{'_pinned' if is_pinned else ''}"
        figures[words] = assert_same_gradients(model, by_hand)
    return figures


@check(worlds=(1,))
def inputs_on_the_gpu(world: World) -> dict[str, Any]:
    """Inputs of unusual layouts, and inputs that require gradients."""
    model, by_hand = pair(world, smooth, 3)
    wide = world.normal(32, N_ROWS)
    forms = {
        "contiguous": wide.t().contiguous()[:, :16],
        "transposed": wide.t()[:, ::2],
        "expanded": wide[:16, 0].expand(N_ROWS, 16),
        "reversed": wide.t()[:, :16].flip(0),
    }
    figures = {}
    for name, x in forms.items():
        grads = []
        for each in (model, by_hand):
            each.zero_grad()
            given = x.detach().requires_grad_()
            (each(given).square().sum() + given.sum()).backward()
            grads.append(given.grad)
        assert_near(grads[0], grads[1], f"{name}: gradient of the input")
        figures[name] = assert_same_gradients(model, by_hand, name)
    return figures


@check(worlds=(1,))
def inputs_that_want_gradients_on_the_cpu(world: World) -> None:
    model, by_hand = pair(world, smooth, 2)
    x = torch.randn(N_ROWS, 16, generator=world.generator())
    grads = []
    for each in (model, by_hand):
        leaf = x.clone().requires_grad_()
        given = leaf if each is model else leaf.to(world.device)
        each(given).square().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.device.type == "cpu", leaf.grad.device
        grads.append(leaf.grad)
    assert_near(grads[0], grads[1], "gradient of the input")
    assert_same_gradients(model, by_hand)


@check(worlds=(1,))
def outputs_on_the_cpu(world: World) -> dict[str, Any]:
    """With `output_device=-1`, gradients travel back to the GPU."""
    torch.manual_seed(1)
    module = smooth().to(world.device)
    x = world.normal(N_ROWS, 16)
    far = []
    for n in (1, 2, 3):
        model = world.wrap(module, n, output_device=-1)
        module.zero_grad()
        out = model(x)
        assert out.device.type == "cpu", f"the output is on {out.device}"
        out.square().sum().backward()
        mine = take_gradients(module)
        right = module(x)
        assert_near(out, right.cpu(), f"output of {n} replicas", 2e-4)
        right.square().sum().backward()
        far += near_gradients(mine, module, f"{n} replicas' gradient", 2e-4)
    return {"far": max(far)}


class Several(nn.Module):
    """Returns outputs of several dtypes and layouts, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scores = self.layer(x)
        turned = scores.square().t().contiguous().t()
        others = scores.argmax(1), scores > 0, scores.to(torch.bfloat16)
        return scores, turned, *others, scores.square().mean()


@check(worlds=(1,))
def outputs_of_several_types(world: World) -> None:
    """For their containers see the programs of tests/parity/dp."""
    torch.manual_seed(1)
    module = Several().to(world.device)
    x = world.normal(N_ROWS, 16)
    for n in (2, 3):
        model = world.wrap(module, n)
        columns = list(zip(*map(module, x.tensor_split(n)), strict=True))
        losses = torch.stack(columns.pop())
        for number in range(2):
            out = model(x)
            for i, right in enumerate([*map(torch.cat, columns), losses]):
                assert out[i].dtype == right.dtype, f"output {i}: {out[i].dtype}"
                what = f"call {number} of {n} replicas, output {i}"
                assert_near(out[i].float(), right.float(), what)
        module.zero_grad()
        (out[-1].sum() + out[0][:, 0].sum()).backward()
        mine = take_gradients(module)
        (losses.sum() + torch.cat(columns[0])[:, 0].sum()).backward()
        near_gradients(mine, module, f"{n} replicas' gradient")
