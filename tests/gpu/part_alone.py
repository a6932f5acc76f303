"""One rank whose gradients go all the way: packed, "reduced", averaged by one."""

from __future__ import annotations

import time

import check_features
import check_gradients
import check_models
import check_modes
import session
from checks import checks_of

MODULES = (check_gradients, check_models, check_modes, check_features)


def run(seconds: float) -> bool:
    checks = [each for module in MODULES for each in checks_of(module)]
    return session.run_on_ranks(checks, (1,), time.monotonic() + seconds - 15)
