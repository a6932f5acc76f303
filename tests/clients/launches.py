"""Start client programs with torch or with Paceline, and compare their results.

A program is a file in `programs/`, which is never edited (`support.clients`).  Each
rank writes its results to a file.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.clients import (
    N_RANKS,
    TORCH_ABORTS,
    Library,
    check_wrappers,
    run_command,
)

# Returns the command for a library, a program and the program's arguments.
Launch = Callable[[Library, Path, list[str]], list[str]]

HERE = Path(__file__).parent
TRIES = 4


# ---- ways to start a program ---------------------------------------------------------

OURS: dict[Library, list[str]] = {"torch": [], "paceline": ["-m", "paceline"]}


def alone(library: Library, program: Path, args: list[str]) -> list[str]:
    """Start one process: the program itself starts the other ranks."""
    return [sys.executable, *OURS[library], str(program), *args]


def by_torchrun(library: Library, program: Path, args: list[str]) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(N_RANKS)]
    return [*command, *OURS[library], str(program), *args]


# --cpu would start one process for any number of ranks; the programs set cpu=True.
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
ACCELERATE += ["--num_processes", str(N_RANKS), "--main_process_port", "0"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no"]


def by_accelerate(library: Library, program: Path, args: list[str]) -> list[str]:
    """Start two ranks with accelerate, which runs our module."""
    return [sys.executable, "-m", *ACCELERATE, *OURS[library], str(program), *args]


def with_accelerate(library: Library, program: Path, args: list[str]) -> list[str]:
    """Run accelerate itself under our module; accelerate starts the ranks."""
    return [sys.executable, *OURS[library], "-m", *ACCELERATE, str(program), *args]


# ---- a run ---------------------------------------------------------------------------


@dataclass
class Run:
    """The results of a program: its folder, and each rank's results by title."""

    path: str
    results: list[dict[str, Any]]


def run(
    library: Library,
    launch: Launch,
    program: str,
    folder: Path,
    *args: str,
    has_install_line: bool = False,
) -> Run:
    """Run a program of `programs/` to its end; fail unless the run is good.

    The folder for the program's files is made anew.  The program's arguments come
    after ``--out folder``.  With `has_install_line`, a first line installs Paceline, as
    in a notebook, instead of the command.
    """
    path = HERE / "programs" / program
    started: Library = library
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "watch").mkdir(parents=True)
        if has_install_line:
            started = "torch"
            text = path.read_text()
            if library == "paceline":
                text = f"import paceline; paceline.install()\n{text}"
            path = folder / program
            path.write_text(text)
        command = launch(started, path, ["--out", str(folder), *args])
        code, text, left = run_command(command, folder)
        if TORCH_ABORTS not in text:
            break
    assert code == 0, text
    assert not left, f"processes are left: {left}\n{text}"
    check_wrappers(library, folder / "watch")
    files = [folder / f"rank{rank}.pt" for rank in range(N_RANKS)]
    results = [torch.load(file, weights_only=False) for file in files]
    return Run(str(folder), results)


# ---- comparisons of runs -------------------------------------------------------------

# Comparisons leave out only these: after the last forward, each rank of torch has its
# own statistics, while with Paceline every rank has rank 0's.
STATISTICS = ("running_mean", "running_var")


def difference(
    left: Any, right: Any, at: str, leave_out: tuple[str, ...] = ()
) -> str | None:
    """Return the place of the first different bits of two results; None if equal."""
    if type(left) is not type(right):
        return f"{at}: {type(left).__name__} and {type(right).__name__}"
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return f"{at}: {left.dtype} {left.shape}, {right.dtype} {right.shape}"
        if torch.equal(left, right):
            return None
        far = (left.double() - right.double()).abs().max().item()
        return f"{at}: up to {far:.3g} apart"
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return f"{at}: {sorted(left)} and {sorted(right)}"
        keys = [key for key in left if not str(key).endswith(leave_out or "\0")]
        pairs = [(key, left[key], right[key]) for key in keys]
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            return f"{at}: {len(left)} and {len(right)} things"
        pairs = [(i, *pair) for i, pair in enumerate(zip(left, right, strict=True))]
    else:
        return None if left == right else f"{at}: {left!r} and {right!r}"
    found = (
        difference(one, other, f"{at}[{key!r}]", leave_out) for key, one, other in pairs
    )
    return next(filter(None, found), None)


def _check(rank: int, left: Any, right: Any, at: str) -> None:
    leave_out = STATISTICS if rank > 0 else ()
    found = difference(left, right, f"rank {rank}: {at}", leave_out)
    assert found is None, found


def check_equal(left: Run, right: Run) -> None:
    for rank, (one, other) in enumerate(zip(left.results, right.results, strict=True)):
        titles = one.keys() & other.keys()
        assert titles, "nothing to compare"
        for title in sorted(titles):
            _check(rank, one[title], other[title], title)


def check_ranks_agree(run: Run, title: str = "") -> None:
    """Check that ranks with different data end with the same weights."""
    one, other = (told[title] if title else told for told in run.results)
    found = difference(one["weights"], other["weights"], "weights", STATISTICS)
    assert found is None, found


def check_resumes(whole: Run, resumed: Run, title: str = "resumed") -> None:
    """Check that a resumed run ends like the uninterrupted one."""
    for rank, (one, other) in enumerate(
        zip(whole.results, resumed.results, strict=True)
    ):
        _check(rank, one["train"], other[title], title)


def check_saved(left: Run, right: Run, *names: str) -> None:
    """Check that both runs have saved the same, so that each can resume from both.

    The files are read as plain types and tensors, without classes of either library.
    """
    for name in names:
        one, other = Path(left.path, name), Path(right.path, name)
        if name.endswith(".safetensors"):
            assert one.read_bytes() == other.read_bytes(), name
            continue
        saved = [torch.load(path, weights_only=True) for path in (one, other)]
        for state in saved:
            state.pop("callbacks", None)  # Lightning's, which name the folder
        found = difference(*saved, name)
        assert found is None, found
