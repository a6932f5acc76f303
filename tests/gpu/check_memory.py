"""The memory of one contestant, alone in fresh processes.

torch's own count sees what its allocator gave; the arenas of the native core are not
among it, so what the device has less free is taken too, with all ranks at the same
point.  Both are relative to the moment before the model was made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from checks import Check
from paceline._cli.bench import models
from torch import nn
from world import World, timing

MIB = 2**20
N_STEPS = 6
NAMES = ("transformer", "mlp25m", "mlp100m")


def free_mib(world: World) -> float:
    """What the device has free while all ranks stand here."""
    world.synchronize()
    world.meet()
    free = torch.cuda.mem_get_info()[0] / MIB
    world.meet()
    return free


def wrap_plain(world: World, module: nn.Module) -> nn.Module:
    return module.to(world.device)


def wrap_torch(world: World, module: nn.Module) -> nn.Module:
    return world.theirs(module)


def wrap_torch_view(world: World, module: nn.Module) -> nn.Module:
    return world.theirs(module, gradient_as_bucket_view=True)


def wrap_paceline(world: World, module: nn.Module) -> nn.Module:
    return world.ours(module)


def wrap_paceline_view(world: World, module: nn.Module) -> nn.Module:
    return world.ours(module, gradient_as_bucket_view=True)


CONTESTANTS: dict[str, Callable[[World, nn.Module], nn.Module]] = {
    "none": wrap_plain,
    "torch": wrap_torch,
    "torch_view": wrap_torch_view,
    "paceline": wrap_paceline,
    "paceline_view": wrap_paceline_view,
}


@timing
def measure(world: World, model_name: str, contestant: str) -> dict[str, Any]:
    spec = models.BY_NAME[model_name]
    warm = torch.randn(1024, 1024, device=world.device)
    (warm @ warm).sum().item()  # cuBLAS takes its workspace
    torch.cuda.reset_peak_memory_stats()
    free_before, torch_before = free_mib(world), torch.cuda.memory_allocated() / MIB
    torch.manual_seed(1)
    model = CONTESTANTS[contestant](world, spec.build())
    free_wrapped = free_mib(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = [t.to(world.device) for t in spec.make_batch(world.generator())]
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        spec.loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    after_backward = torch.cuda.memory_allocated() / MIB
    torch.cuda.empty_cache()
    free_after = free_mib(world)
    figures = {
        "model": model_name,
        "contestant": contestant,
        "parameters_mib": sum(p.nbytes for p in model.parameters()) / MIB,
        "device_wrapped_mib": (free_before - free_wrapped) / world.size,
        "device_after_backward_mib": (free_before - free_after) / world.size,
        "torch_after_backward_mib": after_backward - torch_before,
        "torch_peak_mib": torch.cuda.max_memory_allocated() / MIB - torch_before,
    }
    figures = {
        k: round(v, 1) if isinstance(v, float) else v for k, v in figures.items()
    }
    device, peak = figures["device_after_backward_mib"], figures["torch_peak_mib"]
    line = f"{model_name:<12} {contestant:<10} {world.size} ranks: {device} MiB"
    return {**figures, "lines": [f"{line} of the device, torch's peak {peak}"]}


def _check(model_name: str, contestant: str) -> Check:
    function: Any = partial(measure, model_name=model_name, contestant=contestant)
    function.__name__ = f"memory_{model_name}_{contestant}"
    function.__module__ = __name__
    function.is_exact = False
    worlds = (1, 2) if model_name != "transformer" else (1,)
    return Check(function, worlds=worlds, fresh=True, needs_cuda=True, seconds=40)


for _model in NAMES:
    for _contestant in CONTESTANTS:
        _made = _check(_model, _contestant)
        globals()[_made.name] = _made
