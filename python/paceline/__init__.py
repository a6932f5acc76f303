"""Data-parallel training of PyTorch models, by a C core under torch's interface.

world = paceline.init()                          join the ranks that a launcher started
model = paceline.DistributedDataParallel(model)  one process per rank, CPUs or GPUs
model = paceline.DataParallel(model)             replicas in one process
paceline.launch(train, 2)                        run a function on 2 ranks, in a cell
paceline.save({"model": model}, path)            rank 0 writes a whole file or none
paceline.load(path, model=model)                 into a wrapped or a bare model
paceline.install()                               rebind torch's names to these classes
paceline.check(model, batch)                     compare with the bare model
paceline.PeerError                               which rank failed, and why
$ paceline doctor, bench, top, trace             inspect the machine and running jobs
"""

# Everything is imported when a name is first used.  So `paceline doctor` can report
# what is wrong with torch or the extension, and paceline.pth delays few programs.

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing typing's own takes longer than all of this
if TYPE_CHECKING:
    from typing import Any

    from paceline import callbacks as callbacks
    from paceline import data as data
    from paceline._checkpoint import load, save
    from paceline._ddp.distributed import DistributedDataParallel
    from paceline._dp.check import Report, check
    from paceline._dp.data_parallel import DataParallel
    from paceline._dp.functional import data_parallel
    from paceline._dp.marker import replicate
    from paceline._install.rebind import Installation, install, uninstall
    from paceline._launch.init import init
    from paceline._launch.launch import launch
    from paceline._launch.ranks import RankError
    from paceline._launch.world import World
    from paceline._native import MismatchError, PeerError, PeerTimeoutError
    from paceline._values import gather, mean

    __version__: str

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "Installation",
    "MismatchError",
    "PeerError",
    "PeerTimeoutError",
    "RankError",
    "Report",
    "World",
    "__version__",
    "check",
    "data_parallel",
    "gather",
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
    "Installation": "paceline._install.rebind",
    "MismatchError": "paceline._native",
    "PeerError": "paceline._native",
    "PeerTimeoutError": "paceline._native",
    "RankError": "paceline._launch.ranks",
    "Report": "paceline._dp.check",
    "World": "paceline._launch.world",
    "check": "paceline._dp.check",
    "data_parallel": "paceline._dp.functional",
    "gather": "paceline._values",
    "init": "paceline._launch.init",
    "install": "paceline._install.rebind",
    "launch": "paceline._launch.launch",
    "load": "paceline._checkpoint",
    "mean": "paceline._values",
    "replicate": "paceline._dp.marker",
    "save": "paceline._checkpoint",
    "uninstall": "paceline._install.rebind",
}
_SHORT = {"DDP": ["DistributedDataParallel"], "DP": ["DataParallel"]}
INSTALL = "pip install torch, with the build for your machine"


if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib import metadata

            try:
                return metadata.version("paceline")
            except metadata.PackageNotFoundError:  # built in place
                return "0+unknown"
        home = _HOMES.get(name)
        if home is None:
            import difflib

            words = f"module 'paceline' has no attribute {name!r}"
            found = difflib.get_close_matches(name, _HOMES, 1, cutoff=0.7)
            for near in _SHORT.get(name, found):
                words += f": did you mean {near}?"
            raise AttributeError(words, name=name)  # with a name Python adds no hint
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            words = f"paceline.{name} needs torch, which is not installed: {INSTALL}"
            raise ModuleNotFoundError(words, name="torch") from None
        value = getattr(module, name, module)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, "__version__"})
