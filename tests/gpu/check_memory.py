"""The memory of one contestant, alone in fresh processes.

torch counts its allocator, which excludes NCCL's memory.  So the decrease of the
device's free memory is measured too, with all ranks at the same point.  Both are
relative to the moment before the model was made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import bench_models as models
import torch
from checks import add
from torch import nn
from world import World, timing

MIB = 2**20
N_STEPS = 6
NAMES = ("transformer", "mlp25m", "mlp100m")


def free_mib(world: World) -> float:
    """Return the device's free memory in MiB, with all ranks at this point."""
    world.synchronize()
    world.meet()
    free = torch.cuda.mem_get_info()[0] / MIB
    world.meet()
    return free


VIEW = {"gradient_as_bucket_view": True}
CONTESTANTS: dict[str, Callable[[World, nn.Module], nn.Module]] = {
    "none": lambda world, module: module.to(world.device),
    "torch": lambda world, module: world.theirs(module),
    "torch_view": lambda world, module: world.theirs(module, **VIEW),
    "paceline": lambda world, module: world.ours(module),
    "paceline_view": lambda world, module: world.ours(module, **VIEW),
}


def measure(world: World, model_name: str, contestant: str) -> dict[str, Any]:
    spec = models.BY_NAME[model_name]
    warm = torch.randn(1024, 1024, device=world.device)
    (warm @ warm).sum().item()  # cuBLAS allocates its workspace
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


for _model in NAMES:
    for _contestant in CONTESTANTS:
        _made = timing(partial(measure, model_name=_model, contestant=_contestant))
        _worlds = (1, 2) if _model != "transformer" else (1,)
        _options = {"fresh": True, "needs_cuda": True, "seconds": 40}
        _name = f"memory_{_model}_{_contestant}"
        add(globals(), _name, _made, worlds=_worlds, **_options)
