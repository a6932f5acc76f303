"""Bad input gives one error that says what is wrong and what to do; nothing leaks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import paceline
import torch
from check_gradients import Leaves, good_steps
from checks import check
from torch import nn
from world import Reducing, World


def error_of(function: Any, *kinds: type[Exception]) -> str:
    try:
        function()
    except kinds as error:
        if len(str(error)) > 10:
            return f"{type(error).__name__}: {error}"[:600]
        raise AssertionError(f"an error without a message: {error!r}") from error
    raise AssertionError("nothing was raised")


def works_after(world: World) -> None:
    """Check that a new wrapper can be made and trains: no bad state is left."""
    model = world.ours(Leaves([(10,), (90_000,)], [torch.float32]))
    good_steps(world, model, range(2))


def on_two_devices(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4).to(device), nn.Linear(4, 4))


def on_the_device(device: torch.device) -> nn.Module:
    return nn.Linear(4, 4).to(device)


REFUSED: dict[str, tuple[Callable[[torch.device], nn.Module], dict[str, Any]]] = {
    "two devices": (on_two_devices, {}),
    "two ids": (on_the_device, {"device_ids": [0, 1]}),
    "an id of no device": (on_the_device, {"device_ids": [99]}),
    "an id of no kind": (on_the_device, {"device_ids": ["x"]}),
    "the CPU": (lambda device: nn.Linear(4, 4), {"device_ids": [0]}),
}


@check(worlds=(1, 2), needs_cuda=True)
def modules_that_do_not_fit(world: World) -> dict[str, Any]:
    """Modules on several devices, or on devices outside of `device_ids`."""
    kinds = (ValueError, RuntimeError, TypeError, NotImplementedError, AssertionError)
    found = {}
    for what, (make, options) in REFUSED.items():
        wrap = partial(paceline.DistributedDataParallel, make(world.device), **options)
        found[what] = error_of(wrap, *kinds)
    words = found["two devices"]
    assert all(device in words for device in ("cpu", "cuda")), words
    works_after(world)
    return {"words": found}


@check(worlds=(1, 2), needs_cuda=True, seconds=90)
def no_memory_at_construction(world: World) -> dict[str, Any]:
    """If the card is full, every rank raises and frees what it allocated."""
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
    """Run code in a fresh process with other libraries; return its output."""
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
from paceline._ddp.session import Session
Session.needs_reducer = True  # though there is one rank
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    paceline.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
except Exception as error:
    print(type(error).__name__, error)
else:
    print("wrapped")
"""


@check(worlds=(1,), needs_cuda=True, seconds=90)
def libraries_that_are_not_there(world: World) -> dict[str, Any]:
    """A driver that cannot be opened; importing without one works."""
    found = run_apart(WRAP, PACELINE_LIBCUDA="/nowhere/libcuda.so.1")
    assert "/nowhere/libcuda.so.1" in found, found
    assert "wrapped" not in found, found
    imported = run_apart("import paceline; print('imported')", CUDA_VISIBLE_DEVICES="")
    assert "imported" in imported, imported
    return {"driver": found, "import": imported}
