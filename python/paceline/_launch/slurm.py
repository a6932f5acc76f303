"""Tell the variables that SLURM's srun sets from those of its other commands.

A shell of salloc and the script of sbatch have variables of the allocation too; the
script even has ``SLURM_PROCID=0``, although it has started no further tasks.  Only srun
sets the number of a step; a shell that salloc starts as a step has a reserved number.
"""

from __future__ import annotations

import re

from paceline._launch import variables
from paceline._launch.variables import Launch, Variables

_FIRST_RESERVED_STEP = 2**32 - 16
_STEP_IDS = ("SLURM_STEP_ID", "SLURM_STEPID")
_JOB_IDS = ("SLURM_JOB_ID", "SLURM_JOBID")
_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
# The step's list first: a step may have only some nodes of the allocation.
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_SHELLS = ("bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh")
_STEPS_APART = 7919
"""Distance between the ports of two steps: a prime, so that steps of neighbouring jobs
have different ports."""


def from_slurm(found: Variables) -> Launch | None:
    """Return srun's launch; None if srun did not start this process."""
    if not _is_task_of_step(found):
        return None
    rank = found.required("srun", "SLURM_PROCID")
    size = found.required("srun", *_SIZES, least=1)
    addr, port = None, None
    if size > 1:
        _refuse_shell(found, size)
        addr = found.text("MASTER_ADDR") or _first_host_of(found)
        port = found.port() or _port_of(found)
    return Launch(
        "slurm",
        rank,
        size,
        found.required("srun", "SLURM_LOCALID"),
        _local_world_size(found, size),
        addr,
        port,
    )


def is_in_step(found: Variables, *rank_and_size: int | None) -> bool:
    """Tell whether srun started this process as this rank of so many."""
    numbers = found.number("SLURM_PROCID"), found.number(*_SIZES)
    return _is_task_of_step(found) and numbers == rank_and_size


def first_host(nodes: str) -> str:
    """Return the first host of a node list, as ``scontrol show hostnames`` does.

    >>> first_host("node[003-005,9],login")
    'node003'
    """
    first = r"(?:[^][,\s]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+"
    if not re.fullmatch(f"{first}(?:,{first})*", nodes):
        raise ValueError(
            f"{nodes!r} is not a list of nodes such as 'node[003-005,9]': export "
            "MASTER_ADDR, the host of rank 0"
        )
    match = re.match(first, nodes)
    assert match is not None
    return re.sub(r"\[([0-9]+)[^]]*\]", r"\1", match[0])


def _is_task_of_step(found: Variables) -> bool:
    step = found.number(*_STEP_IDS)
    return step is not None and step < _FIRST_RESERVED_STEP


def _refuse_shell(found: Variables, size: int) -> None:
    """Raise in the shell of ``srun -n 2 --pty bash``, whose other tasks have ended.

    The allocation is named after that shell, which is its first step; a step that is
    started from the shell has a later number.
    """
    is_shell = found.text("SLURM_JOB_NAME") in _SHELLS
    if is_shell and found.has("SLURM_PTY_PORT") and found.number(*_STEP_IDS) == 0:
        raise ValueError(
            f"srun --pty started a shell with {size} tasks ({found.show(*_SIZES)}), "
            "and the other tasks have ended: start the program from the shell by "
            "srun, or set RANK=0 and WORLD_SIZE=1 to train in one process"
        )


def _first_host_of(found: Variables) -> str:
    nodes = found.text(*_NODE_LISTS)
    if not nodes:
        raise ValueError(
            f"none of {', '.join(_NODE_LISTS)} is set, though other variables of srun "
            "are: export MASTER_ADDR, the host of rank 0"
        )
    return first_host(nodes)


def _port_of(found: Variables) -> int:
    """Return a port for this step, unlike those of jobs of about the same age."""
    job = found.number(*_JOB_IDS)
    if job is None:
        raise ValueError(
            "SLURM_JOB_ID is not set, though other variables of srun are: export "
            "MASTER_PORT, a free port on the host of rank 0"
        )
    step = found.number(*_STEP_IDS) or 0
    return variables.FIRST_PORT + (job + _STEPS_APART * step) % variables.N_PORTS


def _local_world_size(found: Variables, size: int) -> int | None:
    """Return the step's number of tasks on this node, from a list such as "2(x3),1".

    None if the list is missing, or describes the allocation and not the step.
    """
    counts: list[int] = []
    for part in found.text(*_TASKS_PER_NODE).split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = found.number("SLURM_NODEID")
    if node is None or node >= len(counts) or sum(counts) != size:
        return None
    return counts[node]
