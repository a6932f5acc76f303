"""Count the instructions that Paceline adds to a step; `make count` is this.

    python tests/bench/count.py            print the table
    python tests/bench/count.py --keep     keep the profiles, for callgrind_annotate

Needs valgrind with its headers and a C compiler.  Rank 0 runs under callgrind, rank 1
beside it; since rank 0 is the slower one by far, it never waits.  Each figure is the
median of some steps on the main thread, less that of the plain module.  What malloc and
free need is left out if they have debug symbols: they tidy up at times, for all.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import paceline
import torch
from bench_models import ManySmall
from torch import Tensor, distributed, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.ports import free_port

N_WARM, N_STEPS = 16, 15
FEW, MANY = 100, 300

HELPER = """\
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void dump(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


def layers(n: int) -> nn.Module:
    """Return `n` small linear layers."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(n)))


# ---- the program under callgrind -----------------------------------------------------


def train(model: nn.Module, x: Tensor, name: str, dump: Callable[[str], None]) -> None:
    """Take steps, and dump the counts of each part."""
    for step in range(N_WARM + N_STEPS):
        model.zero_grad()
        if step >= N_WARM:
            dump("rest")
        loss = model(x).sum()
        if step >= N_WARM:
            dump(f"{name}:forward")
        loss.backward()
        if step >= N_WARM:
            dump(f"{name}:backward")


def work(helper: str | None) -> None:
    """Run all models, as one rank."""
    gc.disable()  # it would run in some steps alone
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")

    def dump(name: str) -> None:
        pass

    if helper is not None:
        library = ctypes.CDLL(helper)
        library.start()

        def dump(name: str) -> None:
            library.dump(name.encode())

    for n in (FEW, MANY):
        x = torch.randn(4)
        train(ManySmall(n), x, f"plain {n}", dump)
        train(paceline.DistributedDataParallel(ManySmall(n)), x, f"ddp {n}", dump)
    x = torch.randn(4, 8)
    train(paceline.DistributedDataParallel(layers(1)), x, "ddp layers 1", dump)
    if helper is not None:
        for n in (1, 20):
            train(layers(n), x, f"plain layers {n}", dump)
            replicas = paceline.DataParallel(layers(n), device_ids=["cpu"] * 2)
            train(replicas, x, f"dp {n}", dump)
    distributed.barrier()
    distributed.destroy_process_group()


# ---- the table -----------------------------------------------------------------------


def build_helper(folder: Path) -> Path:
    """Compile the requests to callgrind."""
    library = folder / "helper.so"
    words = ["cc", "-O2", "-shared", "-fPIC", "-xc", "-", "-o", str(library)]
    subprocess.run(words, input=HELPER, text=True, check=True)
    return library


def run(folder: Path) -> None:
    """Run both ranks; leave rank 0's profiles in `folder`."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared["WORLD_SIZE"] = "2"
    program = [sys.executable, __file__, "--work"]
    callgrind = [
        "valgrind",
        "--log-file=/dev/null",
        "--tool=callgrind",
        "--separate-threads=yes",
        "--instr-atstart=no",
    ]
    callgrind += [f"--callgrind-out-file={folder}/out"]
    ranks = [
        subprocess.Popen(
            [*callgrind, *program, str(build_helper(folder))],
            env={**os.environ, **shared, "RANK": "0"},
        ),
        subprocess.Popen(program, env={**os.environ, **shared, "RANK": "1"}),
    ]
    if any(rank.wait() != 0 for rank in ranks):
        sys.exit("a rank failed: see above")


def instructions(profile: str) -> int:
    """Return the sum of a profile's lines, without malloc's."""
    total, is_malloc, is_call = 0, False, False
    names: dict[str, str] = {}
    for line in profile.splitlines():
        if match := re.match(r"f[lie]=(\(\d+\)) ?(.*)", line):
            number, name = match.groups()
            is_malloc = "malloc" in names.setdefault(number, name)
        elif line.startswith("calls="):
            is_call = True  # the next line is the cost of what it calls
        elif match := re.match(r"[+*\d-]\S* (\d+)$", line):
            total += 0 if is_malloc or is_call else int(match[1])
            is_call = False
    return total


def read(folder: Path) -> dict[str, float]:
    """Return the median count of each part."""
    counts = defaultdict(list)
    for path in folder.glob("out.*-01"):  # the main thread's: backward runs there
        text = path.read_text()
        name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
        if name is not None:
            counts[name[1]].append(instructions(text))
    return {name: statistics.median(all_of) for name, all_of in counts.items()}


def table(count: dict[str, float]) -> str:
    """Return the rows, in instructions."""

    def added(wrapped: str, plain: str, part: str) -> float:
        return count[f"{wrapped}:{part}"] - count[f"{plain}:{part}"]

    def per_parameter(part: str) -> float:
        few, many = (added(f"ddp {n}", f"plain {n}", part) for n in (FEW, MANY))
        return (many - few) / (MANY - FEW)

    rows = {}
    for part in ("forward", "backward"):
        one = added("ddp layers 1", "plain layers 1", part)
        rows[f"`DistributedDataParallel` of 1 layer: a {part}"] = one
        rows[f"each further parameter in a {part}"] = per_parameter(part)
    for part in ("forward", "backward"):
        one, more = (added(f"dp {n}", f"plain layers {n}", part) for n in (1, 20))
        rows[f"`DataParallel`, 2 replicas of 1 layer: a {part}"] = one
        rows[f"each further layer in a {part}"] = (more - one) / 19
    lines = ["| what Paceline adds | instructions |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {k} | {v:,.0f} |" for k, v in rows.items())])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep the profiles")
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work is not None:
        work(*chosen.work or [None])
        return
    folder = Path(tempfile.mkdtemp(prefix="count-"))
    run(folder)
    print(table(read(folder)))
    if chosen.keep:
        print(f"\nprofiles: {folder}")
    else:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
