"""DataParallel: several replicas on the one GPU, in one process."""

from __future__ import annotations

import time

import check_replicas
import check_replicas_input
import check_replicas_modes
import session
from checks import checks_of
from replica_world import in_one_process

MODULES = (check_replicas, check_replicas_modes, check_replicas_input)


def run(seconds: float) -> bool:
    checks = in_one_process([c for module in MODULES for c in checks_of(module)])
    return session.run_on_ranks(checks, (1,), time.monotonic() + seconds - 15)
