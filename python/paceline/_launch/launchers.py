"""Find the launcher that started this process, by environment variables.

Several launchers may have set variables: torchrun runs inside srun, mpirun inside an
allocation of SLURM.  The first set of several ranks counts, from the innermost launcher
on; the docstring of :func:`paceline.init` lists them.  A task of Spark or Ray has no
variables: without a launcher, the engine itself is asked.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from paceline._launch import slurm, variables
from paceline._launch.tf_config import from_tf_config
from paceline._launch.variables import Launch, Launcher, Variables

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DEFAULT_PORT = 29500
"""torch's default, if nothing tells the jobs of a host apart."""
# fmt: off
_JOBS = ("SUBMITIT_LOCAL_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
         "SLURM_JOB_ID")
# The program that starts the ranks; the variables of a rank and of their number; those
# of this host.
_Pair = tuple[str, str]
_NAMES: dict[Launcher, tuple[str, _Pair, _Pair]] = {
    "openmpi": ("mpirun", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
                ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")),
    "mvapich": ("mpirun", ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
                ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")),
    "mpich": ("mpirun", ("PMI_RANK", "PMI_SIZE"),
              ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    "submitit": ("submitit", ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS"),
                 ("SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS")),
}
# The module that a task of the engine has imported; how it counts the tasks, with an
# error elsewhere; its name; what sets variables.
_ENGINES: tuple[tuple[str, Callable[[Any], Any], str, str], ...] = (
    ("pyspark", lambda spark: len(spark.BarrierTaskContext.get().getTaskInfos()),
     "pyspark.BarrierTaskContext", "pyspark.ml.torch.distributor.TorchDistributor"),
    ("ray.train", lambda train: train.get_context().get_world_size(),
     "ray.train.get_context()", "ray.train.torch.TorchTrainer"),
)
# fmt: on
# Ranks without a number of ranks, and what is wrong if one of them is not 0.
_LONE_RANKS = {
    "SLURM_PROCID": "SLURM_STEP_ID is not set, which srun sets for each task: start "
    "the program by srun, and pass all SLURM_ variables on to it",
    "PMIX_RANK": "no variable says of how many: set RANK, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT on every rank, or start the program by mpirun or srun",
}


def find_launch(environ: Mapping[str, str]) -> Launch:
    """Return the launch that environment variables describe.

    Raise ValueError if some are wrong, contradict one another, or are missing.
    """
    found = Variables(environ)
    launch = _from_torchrun(found)
    if launch is None:
        launch = _from_launchers(found)
        launch = _alone(found) if launch is None else _agreed(found, launch)
    _check_ranges(launch)
    return launch


def _from_torchrun(found: Variables) -> Launch | None:
    rank, size = found.number("RANK"), found.number("WORLD_SIZE", least=1)
    addr, port = found.text("MASTER_ADDR"), found.port()
    if rank is None or size is None:
        return None
    if size > 1 and not (addr and port):
        return None
    return Launch(
        "torchrun" if found.has("TORCHELASTIC_RUN_ID") else "environment",
        rank,
        size,
        found.number("LOCAL_RANK"),
        found.number("LOCAL_WORLD_SIZE", least=1),
        addr or None,
        port,
    )


def _from_launchers(found: Variables) -> Launch | None:
    """Return the first launch of several ranks; else the first: it may be inherited."""
    first = None
    finders: list[Callable[[Variables], Launch | None]] = [
        *(partial(_from_numbers, launcher=launcher) for launcher in _NAMES),
        from_tf_config,
        slurm.from_slurm,
    ]
    for find in finders:
        launch = find(found)
        if launch is not None and (launch.world_size > 1 or launch.rank < 0):
            return launch
        first = first or launch
    return first


def _from_numbers(found: Variables, launcher: Launcher) -> Launch | None:
    """Return a launch whose variables are numbers only, with no host of rank 0."""
    starter, names, local = _NAMES[launcher]
    if not any(map(found.has, names)):
        return None
    if launcher == "mpich" and slurm.is_in_step(found, *map(found.number, names)):
        return None  # srun describes the hosts, too
    rank = found.required(starter, names[0])
    size = found.required(starter, names[1], least=1)
    local_size = found.number(local[1], least=1)
    addr, port = None, None
    if size > 1:
        on_one_host = "127.0.0.1" if local_size == size else None
        addr = found.text("MASTER_ADDR") or on_one_host
        port = found.port() or _port_of_job(found)
        if addr is None:
            raise ValueError(
                f"{starter} started {size} ranks that are not known to be on one host "
                f"({found.show(*names, *local)}), and MASTER_ADDR is not set: export "
                "MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there, "
                "and pass them to all ranks (Open MPI: mpirun -x MASTER_ADDR -x "
                "MASTER_PORT)"
            )
    return Launch(launcher, rank, size, found.number(local[0]), local_size, addr, port)


def _port_of_job(found: Variables) -> int:
    job = found.text(*_JOBS)
    if not job:
        return _DEFAULT_PORT
    return variables.FIRST_PORT + zlib.crc32(job.encode()) % variables.N_PORTS


def _alone(found: Variables) -> Launch:
    """Return a world of one process; raise if variables hint at more."""
    if any(map(found.has, variables.ALL)):
        missing = [name for name in _NEEDED if not found.has(name)]
        raise ValueError(
            f"{found.show(*variables.ALL)} set, but not {', '.join(missing)}: set "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does, or unset "
            "them all to train in one process"
        )
    for name, problem in _LONE_RANKS.items():
        if found.number(name):
            raise ValueError(
                f"{found.show(name)}: this is one of several ranks, but {problem}"
            )
    _refuse_task()
    note = ""
    tasks = found.number("SLURM_NTASKS")
    if tasks is not None and tasks > 1:
        note = f"SLURM_NTASKS is {tasks}, but srun did not start this process"
    return Launch("none", 0, 1, 0, 1, note=note)


def _refuse_task() -> None:
    """Raise in one of several tasks of an engine: each would train alone."""
    for module, count, context, helper in _ENGINES:
        n_tasks = 1
        # KeyError: the engine has not started this process.  In drivers Ray warns.
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            n_tasks = int(count(sys.modules[module]))
        if n_tasks > 1:
            raise ValueError(
                f"{context} counts {n_tasks} tasks, but RANK, WORLD_SIZE, MASTER_ADDR "
                f"and MASTER_PORT are not set: train by {helper}, which sets them, or "
                "set them in each task (RANK=0 and WORLD_SIZE=1 to train alone)"
            )


def _agreed(found: Variables, launch: Launch) -> Launch:
    """Add the user's own variables to a launch; raise if they contradict it.

    Variables of other launchers do not count here: they have been found incomplete.
    """
    added: dict[str, Any] = {}
    for name in variables.NUMBERS:
        value, number = getattr(launch, name.lower()), found.number(name)
        if value is None:
            added[name.lower()] = number
        elif number is not None and number != value:
            raise ValueError(
                f"{name} is {number}, but {value} by the variables of the launcher "
                f"({launch.launcher}): unset {name}, or set RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT, which then count alone"
            )
    return dataclasses.replace(launch, **added)


def _check_ranges(launch: Launch) -> None:
    """Raise if a rank is not below the number of ranks, in all or on its host."""
    size, local_size = launch.world_size, launch.local_world_size
    by = f"by the variables of the launcher ({launch.launcher})"
    if launch.rank >= size:
        raise ValueError(
            f"rank {launch.rank} of {size} {by}: ranks go from 0 to {size - 1}; set "
            "RANK and WORLD_SIZE anew on every rank"
        )
    most = size if local_size is None else local_size
    is_outside = launch.rank < 0
    local_rank = launch.local_rank
    if local_size is not None and local_size > size:
        raise ValueError(
            f"{local_size} ranks on this host, of {size} in all {by}: set "
            "LOCAL_WORLD_SIZE, at most WORLD_SIZE"
        )
    if local_rank is not None and local_rank >= most and not is_outside:
        raise ValueError(
            f"local rank {local_rank} of {most} on this host {by}: local ranks go from "
            f"0 to {most - 1}; set LOCAL_RANK anew"
        )
