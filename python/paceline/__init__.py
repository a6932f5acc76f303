"""Data-parallel training of PyTorch models, by a C core under torch's interface.

world = paceline.init()                          join the ranks of any launcher
model = paceline.DistributedDataParallel(model)  one process a rank, CPUs or GPUs
model = paceline.DataParallel(model)             replicas in one process: a notebook
paceline.launch(train, 2)                        run a function as ranks, from a cell
paceline.save({"model": model}, path)            by rank 0, whole or not at all
paceline.load(path, model=model)                 after a restart, wrapped or bare
paceline.install()                               give torch's names these classes
paceline.check(model, batch)                     compare with the plain model
paceline.PeerError                               which rank has failed, and why
$ paceline doctor, bench, top, trace             the machine, and running jobs
"""

# Neither torch nor the extension is imported before a name is used: `paceline doctor`
# can then say what is wrong with them.

from __future__ import annotations

import difflib
import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import callbacks as callbacks
    from paceline import data as data
    from paceline._checkpoint import load, save
    from paceline._ddp.distributed import DistributedDataParallel
    from paceline._dp.check import check
    from paceline._dp.data_parallel import DataParallel
    from paceline._dp.functional import data_parallel
    from paceline._dp.marker import replicate
    from paceline._install.rebind import install, uninstall
    from paceline._launch.init import World, init
    from paceline._launch.launch import launch
    from paceline._launch.ranks import RankError
    from paceline._mean import mean
    from paceline._native import MismatchError, PeerError, PeerTimeoutError

try:
    __version__ = metadata.version("paceline")
except metadata.PackageNotFoundError:  # built in place
    __version__ = "0+unknown"

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "MismatchError",
    "PeerError",
    "PeerTimeoutError",
    "RankError",
    "World",
    "__version__",
    "check",
    "data_parallel",
    "init",
    "install",
    "launch",
    "load",
    "mean",
    "replicate",
    "save",
    "uninstall",
]

_HOMES = {
    "callbacks": "paceline.callbacks",
    "data": "paceline.data",
    "DataParallel": "paceline._dp.data_parallel",
    "DistributedDataParallel": "paceline._ddp.distributed",
    "MismatchError": "paceline._native",
    "PeerError": "paceline._native",
    "PeerTimeoutError": "paceline._native",
    "RankError": "paceline._launch.ranks",
    "World": "paceline._launch.init",
    "check": "paceline._dp.check",
    "data_parallel": "paceline._dp.functional",
    "init": "paceline._launch.init",
    "install": "paceline._install.rebind",
    "launch": "paceline._launch.launch",
    "load": "paceline._checkpoint",
    "mean": "paceline._mean",
    "replicate": "paceline._dp.marker",
    "save": "paceline._checkpoint",
    "uninstall": "paceline._install.rebind",
}


if not TYPE_CHECKING:  # a type checker would take any name for one

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            words = f"module 'paceline' has no attribute {name!r}"
            for near in difflib.get_close_matches(name, _HOMES, 1, cutoff=0.7):
                words += f": did you mean {near}?"
            raise AttributeError(words, name=name)  # and Python adds no words
        module = importlib.import_module(home)
        value = getattr(module, name, module)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
