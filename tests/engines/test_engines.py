"""Ray, Spark, Dask, submitit, torchrun and mpirun train as torch's class does.

Programs and commands are those of docs/engines.md.  In a run of "torch" a module named
`paceline` is beside them, which calls torch alone.  Each rank writes its weights when
it is done: all must be those of two ranks of torch that no engine has started.

`make engines` runs them, in an environment of its own: each run imports torch in three
processes or more.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from documents import ENGINES as PAGE
from documents import commands_of, scripts_in, scripts_of
from support.clients import (
    N_RANKS,
    TORCH_ABORTS,
    WATCH,
    check_wrappers,
    needs,
    run_command,
)
from support.ports import free_port

# As in an activated environment.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
TRIES = 4

# The loopback alone, and nothing outside of the test's folders.
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's address is then 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "SPARK_LOCAL_IP": "127.0.0.1",
}

# ---- what is added to the programs ---------------------------------------------------

# paceline.py of a run of torch alone
STOCK = """
from types import SimpleNamespace
import torch
import torch.distributed as dist

def init():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return SimpleNamespace(
        rank=dist.get_rank(), is_main=dist.get_rank() == 0, device="cpu",
        world_size=dist.get_world_size(), launcher="torch",
    )

def save(state, path):
    if dist.get_rank() == 0:
        torch.save({"epoch": state["epoch"]}, path)
"""
REFERENCE = """
import os
import torch
import training

def rank(number):
    os.environ.update(RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = "29500"
    training.train("reference.pt")

torch.multiprocessing.start_processes(rank, nprocs=2, start_method="fork")
"""
# in training.py
TELL = """
_fit = fit

def fit(model, *args):
    _fit(model, *args)
    rank = torch.distributed.get_rank()
    torch.save(model.module.state_dict(), f"FOLDER/rank{rank}.pt")
"""
# Rank 1 ends its process in the second of four epochs, once.
DIE = """
_whole_fit = fit

def fit(model, *args):
    steps = []

    def die(*_):
        steps.append(1)
        is_there = os.path.exists("FOLDER/died")
        if len(steps) == 9 and torch.distributed.get_rank() == 1 and not is_there:
            open("FOLDER/died", "w").close()
            os._exit(1)

    model.register_forward_pre_hook(die)
    _whole_fit(model, *args)
"""

# ---- the engines ---------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """A command of the page, what it needs, and what `init` sees there."""

    command: str
    needed: tuple[str, ...]
    launcher: str
    ways: str = "torch paceline dies"
    restarts: bool = False  # the engine itself; else the command is given again
    edits: tuple[tuple[str, str], ...] = ()  # of all scripts


TORCHRUN = "torchrun --standalone --nproc-per-node 2 --max-restarts 1"
SUBMITIT = "python -m paceline submitit_ranks.py"
SPARK = ("pyspark", "java")
LOCAL = (("local_mode=False", "local_mode=True"),)
EXPORT = (
    (
        "    world = paceline",
        "    import submitit.helpers as helpers\n"
        "    helpers.TorchDistributedEnvironment().export()\n"
        "    world = paceline",
    ),
)
ENGINES = {
    "ray": Engine(
        "python ray_train.py",
        ("ray",),
        "environment",
        "torch paceline name dies",
        restarts=True,
    ),
    "spark": Engine("python spark_train.py", SPARK, "torchrun"),
    "spark-local": Engine(
        "python -m paceline spark_train.py",
        SPARK,
        "torchrun",
        "torch paceline",
        edits=LOCAL,
    ),
    "dask": Engine("python dask_ranks.py", ("distributed",), "environment"),
    "submitit": Engine(SUBMITIT, ("submitit",), "submitit", "paceline dies"),
    "submitit-export": Engine(
        SUBMITIT, ("submitit",), "environment", "torch paceline", edits=EXPORT
    ),
    "torchrun": Engine(
        f"{TORCHRUN} -m paceline training.py", (), "torchrun", restarts=True
    ),
    "mpirun": Engine(
        "mpirun -n 2 python -m paceline training.py",
        ("mpirun",),
        "openmpi",
        "paceline dies",
    ),
}
OFF = (('PACELINE_INSTALL": "1"', 'PACELINE_INSTALL": "0"'), ("-m paceline ", ""))
OFF += (('PACELINE_INSTALL", "1"', 'PACELINE_INSTALL", "0"'),)
NAME = (*OFF, ("from torch.nn.parallel import D", "from paceline import D"))
NAME += (("prepare_model(module)", "paceline.DistributedDataParallel(module)"),)


def edited(text: str, edits: tuple[tuple[str, str], ...]) -> str:
    for old, new in edits:
        text = text.replace(old, new)
    return text


def rows() -> list[object]:
    return [
        pytest.param(
            engine,
            way,
            id=f"{name}-{way}",
            marks=needs(*engine.needed, remedy="`make engines` installs it"),
        )
        for name, engine in ENGINES.items()
        for way in engine.ways.split()
    ]


def run(command: str, folder: Path) -> tuple[int, str]:
    """Run a command in a folder; return its exit code and its output."""
    words = [sys.executable if w == "python" else w for w in shlex.split(command)]
    if words[0] == "torchrun":
        words[1:1] = ["--local-addr", "127.0.0.1"]
    short = tempfile.mkdtemp(prefix="pl")  # names of sockets are short
    paths = dict.fromkeys(("TMPDIR", "RAY_TMPDIR", "SPARK_LOCAL_DIRS"), short)
    paths["PYTHONPATH"] = f"{WATCH}:{folder}"
    try:
        for _ in range(TRIES):
            code, text, left = run_command(words, folder, **VARIABLES, **paths)
            assert not left, f"processes are left: {left}\n{text}"
            if code == 0 or TORCH_ABORTS not in text:
                break
        return code, text
    finally:
        shutil.rmtree(short, ignore_errors=True)


def check_weights(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    for rank in range(N_RANKS):
        weights: dict[str, torch.Tensor] = torch.load(folder / f"rank{rank}.pt")
        assert weights.keys() == expected.keys()
        different = [n for n in weights if not torch.equal(weights[n], expected[n])]
        assert not different, f"rank {rank}: {different}"


def write(folder: Path, way: str, edits: tuple[tuple[str, str], ...]) -> None:
    """Write the page's scripts and what the test adds to them."""
    (folder / "watch").mkdir()
    edits += {"torch": OFF, "name": NAME}.get(way, ()) + (("29500", str(free_port())),)
    for name, text in scripts_of(PAGE).items():
        if name == "training.py":  # before its last lines, which train
            more = edited(DIE * (way == "dies") + TELL, (("FOLDER", str(folder)),))
            text = text.replace("\ndef train(", f"{more}\n\ndef train(")
        (folder / name).write_text(edited(text, edits))
    if way == "torch":
        (folder / "paceline.py").write_text(STOCK)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights of two ranks of torch."""
    folder = tmp_path_factory.mktemp("reference")
    write(folder, "torch", ())
    (folder / "reference.py").write_text(REFERENCE.replace("29500", str(free_port())))
    code, text = run("python reference.py", folder)
    assert code == 0, text
    check_wrappers("torch", folder / "watch")
    weights: dict[str, torch.Tensor] = torch.load(folder / "rank0.pt")
    assert all(each.isfinite().all() for each in weights.values())
    return weights


@pytest.mark.parametrize(("engine", "way"), rows())
def test_an_engine_trains_to_the_weights_of_torch(tmp_path, expected, engine, way):
    write(tmp_path, way, engine.edits)
    command = (
        edited(engine.command, OFF) if way in ("torch", "name") else engine.command
    )
    if way == "dies" and not engine.restarts:
        code, text = run(command, tmp_path)
        assert code != 0
        assert (tmp_path / "died").exists(), text
    code, text = run(command, tmp_path)
    assert code == 0, text
    assert (tmp_path / "died").exists() == (way == "dies")
    check_wrappers("torch" if way == "torch" else "paceline", tmp_path / "watch")
    check_weights(tmp_path, expected)
    if way != "torch":
        assert re.search(rf"(by|launcher)\W+{engine.launcher}", text), text


def test_each_program_of_the_page_is_run_or_marked():
    text = PAGE.read_text(encoding="utf-8")
    marked = "".join(
        re.findall(r"not run:\n\n```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    )
    commands = [line for line in commands_of(PAGE) if line not in marked]
    assert {engine.command for engine in ENGINES.values()} == set(commands)
    started = {script for line in commands for script in scripts_in(line)}
    assert started | {"training.py"} == set(scripts_of(PAGE))
