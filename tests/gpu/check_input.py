"""Bad input: one error that says what is wrong and what to do, and nothing leaks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from functools import partial
from typing import Any

import paceline
import torch
from check_gradients import Leaves, good_steps
from checks import check
from torch import nn
from world import Reducing, World


def error_of(function: Any, *kinds: type[Exception]) -> str:
    """The words of the error that a call must raise."""
    try:
        function()
    except kinds as error:
        if len(str(error)) > 10:
            return f"{type(error).__name__}: {error}"[:600]
        raise AssertionError(f"an error without words: {error!r}") from error
    raise AssertionError("nothing was raised")


def works_after(world: World) -> None:
    """A wrapper can be made, and trains: nothing was left in a bad state."""
    model = world.ours(Leaves([(10,), (90_000,)], [torch.float32]))
    good_steps(world, model, range(2))


@check(worlds=(1, 2), needs_cuda=True)
def a_model_on_two_devices(world: World) -> dict[str, Any]:
    def wrap() -> None:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        layers[0].to(world.device)
        paceline.DistributedDataParallel(layers)

    words = error_of(wrap, ValueError, RuntimeError, NotImplementedError)
    assert all(device in words for device in ("cpu", "cuda")), words
    works_after(world)
    return {"words": words}


@check(worlds=(1, 2), needs_cuda=True)
def device_ids_that_do_not_fit(world: World) -> dict[str, Any]:
    def wrap(**options: Any) -> Any:
        module = nn.Linear(4, 4).to(world.device)
        return lambda: paceline.DistributedDataParallel(module, **options)

    found = {}
    n = torch.cuda.device_count()
    for options in ({"device_ids": [0, 1]}, {"device_ids": [n]}, {"device_ids": ["x"]}):
        kinds = (ValueError, RuntimeError, TypeError, AssertionError)
        found[str(options)] = error_of(wrap(**options), *kinds)
    works_after(world)
    return {"words": found}


@check(worlds=(1, 2), needs_cuda=True)
def a_module_moved_to_the_cpu_alone(world: World) -> dict[str, Any]:
    """The model is on the GPU, `device_ids` with a CPU module is refused."""

    def wrap() -> None:
        paceline.DistributedDataParallel(nn.Linear(4, 4), device_ids=[0])

    words = error_of(wrap, ValueError, RuntimeError)
    works_after(world)
    return {"words": words}


@check(worlds=(1, 2), needs_cuda=True, seconds=90)
def no_memory_at_construction(world: World) -> dict[str, Any]:
    """The card is full: an error on every rank; what was taken is given back."""
    module = nn.ParameterList(
        torch.empty(64 << 20, device=world.device) for _ in range(8)
    )
    world.meet()
    free, _ = torch.cuda.mem_get_info()
    world.meet()
    hoard = []
    if world.rank == 0:
        left = free - (600 << 20)
        while left > 0:
            n = min(left, 4 << 30)
            hoard.append(torch.empty(n, dtype=torch.uint8, device=world.device))
            left -= n
    world.meet()

    kinds = (MemoryError, RuntimeError)  # torch's OutOfMemoryError is the latter
    words = error_of(partial(Reducing, module), *kinds)
    world.meet()
    del module
    hoard.clear()
    gc.collect()
    torch.cuda.empty_cache()
    world.meet()
    now, _ = torch.cuda.mem_get_info()
    world.meet()
    works_after(world)
    return {"words": words, "free_mib": [free >> 20, now >> 20]}


def run_apart(code: str, **env: str) -> str:
    """What a fresh process prints that is given other libraries."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_HOSTID")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return f"{done.returncode}: {done.stdout[-800:]}{done.stderr[-800:]}"


WRAP = """
import torch, torch.distributed as dist, paceline
class Reducing(paceline.DistributedDataParallel):
    _needs_reducer = True
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    Reducing(torch.nn.Linear(4, 4).cuda())
except Exception as error:
    print(type(error).__name__, error)
else:
    print("wrapped")
"""


@check(worlds=(1,), needs_cuda=True, seconds=90)
def libraries_that_are_not_there(world: World) -> dict[str, Any]:
    """A driver that cannot be opened; an import without one works."""
    found = run_apart(WRAP, PACELINE_LIBCUDA="/nowhere/libcuda.so.1")
    assert "/nowhere/libcuda.so.1" in found, found
    assert "wrapped" not in found, found
    imported = run_apart("import paceline; print('imported')", CUDA_VISIBLE_DEVICES="")
    assert "imported" in imported, imported
    return {"driver": found, "import": imported}
