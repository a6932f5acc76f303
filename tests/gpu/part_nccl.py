"""Two and three ranks on the one GPU, over NCCL."""

from __future__ import annotations

import time

import session
from checks import checks_of
from part_alone import MODULES


def run(seconds: float) -> bool:
    checks = [each for module in MODULES for each in checks_of(module)]
    return session.run_on_ranks(checks, (2, 3), time.monotonic() + seconds - 15)
