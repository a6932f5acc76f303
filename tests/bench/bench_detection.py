"""What it costs DataParallel to notice that nothing has changed, and what if it has.

    python tests/bench/bench_detection.py
    python tests/bench/bench_detection.py --modules 50 --parameters 500

Processes: `SharedModel.changes()` before a forward and `forward_ends()` after it, on a
model that stays as it is; then with each of some changes in every round.  `of torch's`
is the part of it in which torch's own two functions are called that tell a parameter's
address and whether it requires a gradient: no public one asks for less.  Threads: they
make shells of all modules anew for each forward, and so notice everything; what that
takes is given beside it.

Rounds alternate between all of the rows, and medians over rounds are printed; the 10th
percentile stands behind.  A machine that has other work to do shows in the median.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from machine import describe
from paceline._cli.bench.stats import percentile
from paceline._compat import torch_core
from paceline._dp.process import pickling
from paceline._dp.process.shared_model import SharedModel
from paceline._replicas.replicate import parts_of, replicas_of
from torch import nn

N_LOG = 10_000
N_HELD = 100


SETTINGS = {"scale": 1.0}


def bend(x: torch.Tensor) -> torch.Tensor:
    """Read a global, as the code of a model does."""
    return x * SETTINGS["scale"]


class Block(nn.Module):
    """Some parameters, and what a module holds beside them."""

    def __init__(self, n_parameters: int) -> None:
        super().__init__()
        for i in range(n_parameters):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.zeros(8)))
        self.size = (8, 8)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            x = bend(x + parameter)
        return x


def make_model(n_modules: int, n_parameters: int) -> nn.Sequential:
    """Return blocks in a row; the row is one of the modules."""
    share, more = divmod(n_parameters, n_modules - 1)
    return nn.Sequential(*[Block(share + (i < more)) for i in range(n_modules - 1)])


def rows_of(n_modules: int, n_parameters: int) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by its name."""
    steady = SharedModel(
        make_model(n_modules, n_parameters), 1, pickling.ScriptGlobals()
    )
    attribute = SharedModel(
        make_model(n_modules, n_parameters), 1, pickling.ScriptGlobals()
    )
    log = SharedModel(make_model(n_modules, n_parameters), 1, pickling.ScriptGlobals())
    told = SharedModel(make_model(n_modules, n_parameters), 1, pickling.ScriptGlobals())
    for model in (log, told):
        model.module.log = list(range(N_LOG))
        model.changes()
    tensors = SharedModel(nn.ParameterList(), 1, pickling.ScriptGlobals())
    arrays = SharedModel(nn.ParameterList(), 1, pickling.ScriptGlobals())
    tensors.module.held = [torch.zeros(8) for _ in range(N_HELD)]
    arrays.module.held = [np.zeros(8) for _ in range(N_HELD)]
    for model in (tensors, arrays):
        model.changes()
    module = make_model(n_modules, n_parameters)

    def set_attribute() -> None:
        attribute.module[0].scale += 1.0
        attribute.forward_ends()

    def grow_in_forward() -> None:
        log.module.log.append(len(log.module.log))
        log.forward_ends()

    def grow_between() -> None:
        told.module.log.append(len(told.module.log))
        assert told.changes()

    return {
        "processes: before a forward": steady.changes,
        "processes: after it": steady.forward_ends,
        "  of torch's: addresses": steady.memory.placed.moved,
        "  of torch's: requires_grad": steady.memory.placed.trainable,
        f"processes: an attribute holds {N_HELD} tensors": tensors.changes,
        f"processes: an attribute holds {N_HELD} arrays": arrays.changes,
        "processes: a forward sets an attribute": set_attribute,
        f"processes: it appends to a list of {N_LOG}": grow_in_forward,
        "processes: such a list grows between": grow_between,
        "threads: shells for a replica": lambda: replicas_of(parts_of(module), [{}]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__ or "", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", type=int, default=200)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    torch_core.attach()
    rows = rows_of(given.modules, given.parameters)
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(given.rounds):
        for name, call in rows.items():
            call()
            for _ in range(10):
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
    n_things = given.modules + given.parameters
    for name, value in describe().items():
        print(f"{name}: {value}")
    print(f"{given.parameters} parameters in {given.modules} modules")
    print(f"{'':<44}{'us':>8}{'10 %':>8}{'ns a parameter and module':>28}")
    for name, values in times.items():
        middle, low = percentile(values, 50), percentile(values, 10)
        print(
            f"{name:<44}{middle * 1e6:8.1f}{low * 1e6:8.1f}"
            f"{middle * 1e9 / n_things:14.1f}{low * 1e9 / n_things:14.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
