"""The tests of tests/parity/ddp that are marked `@on_gpus_too`, on this GPU.

A check runs those of one file for 2 or 3 ranks, also after one has failed, and names
those that have.  New tensors are on the GPU, and torch's class averages with NCCL.  In
a rehearsal the GPU is a torch device in the host's memory.  torch has no NCCL for it,
so torch's class is on the CPU, and rows with collectives on the GPU are left out.
"""

from __future__ import annotations

import importlib
import itertools
import re
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import world
from checks import Skip, add, is_fake, is_quick, simulated

FILES = Path(__file__).parents[1] / "parity/ddp"
MARK = re.compile(r"^@on_gpus_too\(([\d, ]*)", re.MULTILINE)
N_WORDS = 600  # characters of each failure
NO_NCCL = "No backend type associated with device type gpu"


class World(world.World):
    """Ranks whose GPU is a torch device, in a rehearsal too."""

    @classmethod
    def join(cls, rank: int, size: int, port: int) -> World:
        """Make the default group, and have cases use the GPU."""
        made = super().join(rank, size, port)
        if is_fake():
            simulated().show_own(rank)
            made.device = torch.device(simulated().devices.KIND, 0)
        return made


def cases_of(file: str, size: int) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the functions of a file for this number of ranks, with their points."""
    for body in vars(importlib.import_module(file)).values():
        n_ranks, axes = getattr(body, "on_gpus", ((), {}))
        if size in n_ranks:
            points = list(itertools.product(*axes.values()))
            for point in points[:1] if is_quick() else points:
                yield body, point


def run_rows(world: World, file: str) -> dict[str, Any]:
    try:
        import cases
    except ImportError as missing:  # pytest, or NumPy
        raise Skip(f"the tests cannot be imported: {missing}") from None
    if is_fake():
        cases.on_torchs_device = partial(torch.device, "cpu")
    else:
        cases.backend = "cpu:gloo,cuda:nccl"
    store = dist.distributed_c10d._get_default_store()
    failed: list[str] = []
    n_passed = 0
    for order, (body, point) in enumerate(cases_of(file, world.size)):
        number = zlib.crc32(f"{file}/{order}".encode())
        with torch.device(world.device):
            words = cases.run_case(world.rank, world.size, store, number, body, point)
        world.synchronize()
        found = world.all(words)
        n_passed += not any(found)
        name = f"{body.__name__}{list(point)}"
        failed += [
            f"{name}, rank {rank}: {one[-N_WORDS:]}"
            for rank, one in enumerate(found)
            if one and not one.startswith(cases.SKIPPED) and NO_NCCL not in one
        ]
    assert not failed, f"{n_passed} rows passed, these failed:\n" + "\n".join(failed)
    return {"rows": n_passed}


for _path in sorted(FILES.glob("test_*.py")):
    _given = MARK.findall(_path.read_text())
    _worlds = {int(n) for marks in _given for n in re.findall(r"\d", marks) or [2]}
    _options = {
        "worlds": tuple(sorted(_worlds & {2, 3})),
        "seconds": 90,
        "env": (
            ("PACELINE_GPU_WORLD", "check_rows"),
            ("PACELINE_TIMEOUT", "10"),
            ("FUZZ", "8"),
        ),
    }
    if _options["worlds"]:
        _made = partial(run_rows, file=_path.stem)
        add(globals(), _path.stem.replace("test", "rows"), _made, **_options)
