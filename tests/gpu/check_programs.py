"""The programs of tests/parity/dp, with replicas that share the GPU.

Each row does the same as with the plain module on the CPU, in float64.  A check runs
the rows of one file, also after one has failed, and names those that have.
"""

from __future__ import annotations

import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from checks import Skip, add, is_quick
from replica_world import World

FILES = Path(__file__).parents[1] / "parity/dp/programs"
N_WORDS = 600  # characters of each failure


def run_rows(world: World, file: str) -> dict[str, Any]:
    try:
        import programs
        from programs._where import runs_on_one_real_gpu
    except ImportError as missing:  # pytest, or NumPy
        raise Skip(f"the programs cannot be imported: {missing}") from None
    warnings.simplefilter("ignore")
    failed, n_run = [], 0
    for row in programs.rows_of(file)[:: 4 if is_quick() else 1]:
        if not runs_on_one_real_gpu(row.name):
            continue
        devices = [d for d in programs.devices_of(row) if d.startswith("gpu")]
        for device in devices[:1] if is_quick() else devices:
            n_run += 1
            try:
                programs.check_on_a_gpu(row, device)
                world.synchronize()
            except Exception:
                words = traceback.format_exc()[-N_WORDS:]
                failed.append(f"{row.name} on {device}: {words}")
    assert not failed, f"{len(failed)} of {n_run} rows:\n" + "\n".join(failed)
    return {"rows": n_run}


for _path in sorted(FILES.glob("[a-z]*.py")):
    _made = partial(run_rows, file=_path.stem)
    add(globals(), f"programs_{_path.stem}", _made, worlds=(1,), seconds=90)
