"""Run tests of the CPU on simulated CUDA and NCCL too: those with `@on_gpus_too`.

`tests/gpu/check_rows.py` runs them on a GPU.  What `tests/gpu/check_*.py` check of
gradients, models and failures is not repeated here.
"""

import importlib
import os
from pathlib import Path

from gpus import on_gpus
from support import fake_gpus


def environment():
    """Return the ranks' variables; draw fewer loops than on the CPU."""
    return {**fake_gpus.environment(), "FUZZ": os.environ.get("FUZZ", "8")}


for path in sorted(Path(__file__).parent.glob("test_*.py")):
    if "test_cuda" in path.name:
        continue
    for name, body in vars(importlib.import_module(path.stem)).items():
        if hasattr(body, "on_gpus"):
            n_ranks, axes = body.on_gpus
            globals()[name] = on_gpus(*n_ranks, **axes)(body)
