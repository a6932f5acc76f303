"""What goes wrong: in backward, in other ranks, in what the user gives."""

from __future__ import annotations

import time

import check_failures
import check_input
import session
from checks import checks_of


def run(seconds: float) -> bool:
    checks = [*checks_of(check_input), *checks_of(check_failures)]
    return session.run_on_ranks(checks, (1, 2), time.monotonic() + seconds - 15)
