"""Environment variables read as numbers, and the launch that they describe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# fmt: off
Launcher = Literal["torchrun", "environment", "openmpi", "mvapich", "mpich", "submitit",
                   "tf_config", "slurm", "none", "unknown"]
# fmt: on

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
ALL = (*NUMBERS, "MASTER_ADDR", "MASTER_PORT")
"""Those of torchrun; in small letters, they are fields of :class:`Launch`."""
FIRST_PORT = 12000
N_PORTS = 20000
"""Ports that are derived from a job: below those that Linux assigns by itself."""


@dataclass(frozen=True)
class Launch:
    """What a launcher's variables say about this process."""

    launcher: Launcher  # as in :class:`paceline.World`
    rank: int  # -1 for a process outside the world, such as an evaluator
    world_size: int
    # Among those of this host; None if the launcher does not set it.
    local_rank: int | None = None
    local_world_size: int | None = None  # likewise
    master_addr: str | None = None  # the host of rank 0; None for a world of one
    master_port: int | None = None  # on that host
    note: str = ""  # for the user


class Variables:
    """Environment variables; an empty one counts as not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str:
        """Return the value of the first variable that is set; "" if none is."""
        return next(filter(None, map(self._value, names)), "")

    def has(self, name: str) -> bool:
        """Tell whether a variable is set."""
        return bool(self._value(name))

    def number(self, *names: str, least: int = 0) -> int | None:
        """Return the first variable that is set, as a number; None if none is."""
        for name in filter(self.has, names):
            text = self._value(name)
            if not re.fullmatch("[0-9]{1,18}", text) or int(text) < least:
                raise ValueError(
                    f"{name} is {text!r}: a whole number from {least} on is expected"
                )
            return int(text)
        return None

    def required(self, launcher: str, *names: str, least: int = 0) -> int:
        """Return the first variable that is set; raise if `launcher` has set none."""
        value = self.number(*names, least=least)
        if value is None:
            raise ValueError(
                f"{' and '.join(names)} not set, though other variables of {launcher} "
                f"are: start the program by {launcher}, or set RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT"
            )
        return value

    def port(self) -> int | None:
        """Return ``MASTER_PORT``; None if it is not set."""
        port = self.number("MASTER_PORT", least=1)
        if port is not None and port > 65535:
            raise ValueError(f"MASTER_PORT is {port}: ports go from 1 to 65535")
        return port

    def show(self, *names: str) -> str:
        """Return the variables among `names` that are set, with their values."""
        return ", ".join(
            f"{name}={self._value(name)}" for name in names if self.has(name)
        )

    def _value(self, name: str) -> str:
        return self._environ.get(name, "").strip()
