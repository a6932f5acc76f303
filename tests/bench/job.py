"""What the parent asks a group of ranks to do; it travels as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One task for one group of processes."""

    task: str  # one of TASKS in rank.py
    ranks: int
    contestants: list[str]
    model: str = ""  # all but "all_reduce"
    blocks: int = 1  # turns that each contestant takes
    steps_per_block: int = 0  # timed steps of a turn; 0: the model's own number
    settle_steps: int = 2  # untimed steps before them
    sizes_bytes: list[int] = field(default_factory=list)  # "all_reduce" only
    order_seed: int = 0  # of the order in which contestants take turns
    limit_seconds: float = 300.0
    namespaces: list[str] = field(default_factory=list)  # of each rank; none: its own

    def save(self, path: Path) -> None:
        """Write the job for the ranks to read."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))
