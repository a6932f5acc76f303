"""What training costs in the GPU's memory: the plain module, torch DDP, ours."""

from __future__ import annotations

import time

import check_memory
import session
from checks import checks_of


def run(seconds: float) -> bool:
    checks = checks_of(check_memory)
    return session.run_on_ranks(checks, (1, 2), time.monotonic() + seconds - 15)
