"""Find the launcher that started this process, by environment variables alone.

Several launchers may have set variables: torchrun runs inside srun, mpirun inside an
allocation of SLURM.  The first complete set counts, from the innermost launcher on; the
docstring of :func:`paceline.init` lists them.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

from paceline._launch import slurm, variables
from paceline._launch.tf_config import from_tf_config
from paceline._launch.variables import Launch, Variables

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DEFAULT_PORT = 29500
"""torch's default, if nothing tells the jobs of a host apart."""
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID")


def find_launch(environ: Mapping[str, str]) -> Launch:
    """Return the launch that environment variables describe.

    Raise ValueError if some are wrong, contradict one another, or are missing.
    """
    found = Variables(environ)
    launch = _from_torchrun(found)
    if launch is None:
        launch = (
            _from_open_mpi(found)
            or _from_mpich(found)
            or from_tf_config(found)
            or slurm.from_slurm(found)
        )
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


def _from_open_mpi(found: Variables) -> Launch | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _from_mpi(found, "openmpi", names, local)


def _from_mpich(found: Variables) -> Launch | None:
    names = ("PMI_RANK", "PMI_SIZE")
    rank, size = map(found.number, names)
    if rank is not None and size is not None and slurm.is_in_step(found, rank, size):
        return None  # srun describes the hosts, too
    return _from_mpi(found, "mpich", names, ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _from_mpi(
    found: Variables,
    launcher: variables.Launcher,
    names: tuple[str, str],
    local: tuple[str, str],
) -> Launch | None:
    """Return mpirun's launch from the variables `names`; `local`: of this host."""
    if not any(map(found.has, names)):
        return None
    rank = found.required("mpirun", names[0])
    size = found.required("mpirun", names[1], least=1)
    local_size = found.number(local[1], least=1)
    addr, port = None, None
    if size > 1:
        on_one_host = "127.0.0.1" if local_size == size else None
        addr = found.text("MASTER_ADDR") or on_one_host
        port = found.port() or _mpi_port(found)
        if addr is None:
            raise ValueError(
                f"mpirun started {size} ranks that are not known to be on one host "
                f"({found.show(*names, *local)}), and MASTER_ADDR is not set: export "
                "MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there, "
                "and pass them to all ranks (Open MPI: mpirun -x MASTER_ADDR -x "
                "MASTER_PORT)"
            )
    return Launch(launcher, rank, size, found.number(local[0]), local_size, addr, port)


def _mpi_port(found: Variables) -> int:
    job = found.text(*_MPI_JOBS)
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
    note = ""
    tasks = found.number("SLURM_NTASKS")
    if tasks is not None and tasks > 1:
        note = f"SLURM_NTASKS is {tasks}, but srun did not start this process"
    return Launch("none", 0, 1, 0, 1, note=note)


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
