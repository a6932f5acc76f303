"""Client programs: what they need, and runs of them, with torch or with Paceline.

The programs are as users write them: `watch/sitecustomize.py` records their wrappers.
A run is good if the program exits with 0 in time, all ranks' wrappers are of the
requested class, and no process is left.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch

Library = Literal["torch", "paceline"]

N_RANKS = 2
TORCHS_CLASS = "torch.nn.parallel.distributed.DistributedDataParallel"
DEADLINE_SECONDS = 240
LEAVING_SECONDS = 20
# Gloo's threads outlive their group.  If a process ends while they run, torch sometimes
# aborts it, with or without paceline.  Such a run is inconclusive.
TORCH_ABORTS = "terminate called without an active exception"
WATCH = Path(__file__).parent / "watch"


def needs(
    *names: str, remedy: str = "`make clients` installs it"
) -> pytest.MarkDecorator:
    """Return the mark that skips a test if modules or programs are not installed."""
    missing = [
        name
        for name in names
        if importlib.util.find_spec(name) is None and shutil.which(name) is None
    ]
    reason = f"not installed: {', '.join(missing)}; {remedy}"
    return pytest.mark.skipif(bool(missing), reason=reason)


def transformers_or_skip() -> ModuleType:
    """Return transformers; skip if it is missing, or refuses this torch as too old.

    With an old torch it can still be imported, but its models are placeholders.
    """
    transformers: ModuleType = pytest.importorskip("transformers")
    if not transformers.is_torch_available():
        pytest.skip(
            f"transformers {transformers.__version__} does not take torch "
            f"{torch.__version__}",
            allow_module_level=True,
        )
    return transformers


# ---- a run ---------------------------------------------------------------------------


def start(
    command: list[str], folder: Path, **variables: str
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a command; return the mark in the environment of all its processes."""
    mark = uuid.uuid4().hex
    paths = [str(WATCH), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        "CLIENTS_RUN": mark,
        "CLIENTS_WATCH": str(folder / "watch"),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",  # so that sums have one order
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    with (folder / "output.txt").open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return process, mark


def run_command(
    command: list[str], folder: Path, **variables: str
) -> tuple[int, str, list[str]]:
    """Return the exit code, the output, and the processes that were left."""
    process, mark = start(command, folder, **variables)
    output = folder / "output.txt"
    try:
        process.wait(DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        _send(_processes(mark), signal.SIGUSR2)  # each one prints its stacks
        time.sleep(2)
        end_all(mark, patience=0)
        process.wait()
        text = output.read_text(errors="replace")
        pytest.fail(f"not done after {DEADLINE_SECONDS} s\n{text}", pytrace=False)
    except BaseException:
        end_all(mark, patience=0)
        raise
    left = end_all(mark)
    return process.returncode, output.read_text(errors="replace"), left


def _processes(mark: str) -> dict[int, str]:
    """Return the processes with a mark in their environment, except zombies."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if mark.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                found[int(entry)] = b" ".join(words).decode(errors="replace")
        except OSError:  # another user's, or gone
            continue
    return found


def end_all(mark: str, patience: float = LEAVING_SECONDS) -> list[str]:
    """Kill the processes that a run has left after some seconds; return them."""
    end = time.monotonic() + patience
    while (left := _processes(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    _send(left, signal.SIGKILL)
    return list(left.values())


def _send(processes: dict[int, str], number: signal.Signals) -> None:
    for pid in processes:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def check_wrappers(library: Library, folder: Path) -> None:
    lines = [line for file in folder.iterdir() for line in file.read_text().split("\n")]
    made = [line.split() for line in lines if line]
    counts = [sum(rank == str(r) for rank, _ in made) for r in range(N_RANKS)]
    assert min(counts) > 0, f"wrappers of each rank: {counts}"
    kinds = {kind for _, kind in made}
    if library == "paceline":
        others = {kind for kind in kinds if not kind.startswith("paceline.")}
        assert not others, f"wrappers of another class: {others}"
    else:
        assert kinds == {TORCHS_CLASS}
