"""Two ranks on the one GPU, which NCCL knows to be there: shared memory, no sockets."""

from __future__ import annotations

import time

import check_failures
import check_gradients
import check_models
import session
from checks import Skip, checks_of, is_rehearsal, run_here
from paceline import _native

FIRST_NCCL = 23003  # 2.30.3


def knows_nccl() -> None:
    """Skip where NCCL is too old to put two ranks on one GPU."""
    if is_rehearsal():
        raise Skip("a rehearsal")
    version = _native.nccl_version(None)
    if version < FIRST_NCCL:
        raise Skip(f"NCCL is {version}; {session.SHARE} is known from {FIRST_NCCL} on")


def run(seconds: float) -> bool:
    """Run the checks of gradients, models and dead ranks in such a world."""
    until = time.monotonic() + seconds - 15
    try:
        knows_nccl()
    except Skip:
        return run_here([("knows_nccl", knows_nccl)])
    modules = (check_gradients, check_models, check_failures)
    checks = session.share([c for module in modules for c in checks_of(module)])
    return session.run_on_ranks(checks, (2,), until)
