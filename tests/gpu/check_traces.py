"""Trace a step of each wrapper with torch.profiler, and keep the trace as a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checks import check, is_fake
from torch import nn
from world import World

N_STEPS = 3  # before the traced step


def keep(world: World, name: str, step: Callable[[], Any]) -> dict[str, Any]:
    """Trace a step; write the trace to OUT, for chrome://tracing or Perfetto."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if not is_fake():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(N_STEPS):
        step()
    world.synchronize()
    with torch.profiler.profile(activities=kinds) as trace:
        step()
        world.synchronize()
    folder = Path(os.environ["PACELINE_GPU_OUT"])
    path = folder / f"trace-{name}.json.gz"
    trace.export_chrome_trace(str(path))
    return {"file": path.name, "bytes": path.stat().st_size}


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(12)])


@check(worlds=(1,))
def of_a_rank(world: World) -> dict[str, Any]:
    model = world.ours(layers())
    x = torch.randn(256, 1024, device=world.device)
    return keep(world, "ddp", lambda: model(x).square().mean().backward())


@check(worlds=(1,))
def of_replicas(world: Any) -> dict[str, Any]:
    model = world.wrap(layers(), 3)
    x = world.normal(256, 1024)
    return keep(world, "dp", lambda: model(x).square().mean().backward())
