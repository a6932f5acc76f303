"""How a worker process is started: its cores, its environment, its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import spawn

from paceline import _cgroup
from paceline._workers import main as worker_main

WORKER_VARIABLE = "PACELINE_WORKER"
"""Set to 1 in the environment of replicas' workers."""
_MANY_BYTES = str(1 << 40)
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_HERMETIC_FLAGS = ("-E", "-I", "-P")


@dataclass(frozen=True)
class Role:
    """What the processes of a group are to the process that starts them.

    Attributes
    ----------
    noun : str
        What messages and prefixes call a process.
    first : int
        The number of the first one; lower numbers are the starting process itself.
    is_program : bool
        Whether each is a program of its own.  It logs and ends as Python does, is
        pinned to no cores, and may start processes, which end with it.  The others
        extend the starting process: what they log is handled there.
    """

    noun: str
    first: int
    is_program: bool

    def prefix(self, number: int) -> str:
        """Return what each printed line begins with; number 0 prints plainly."""
        return f"[{self.noun} {number}] " if number else ""


REPLICA = Role("replica", first=1, is_program=False)
RANK = Role("rank", first=0, is_program=True)


@dataclass(frozen=True)
class Share:
    """What one process of several may use of this machine.

    `cores` to be pinned to are empty where there are too few to give each its own.
    """

    cores: tuple[int, ...]
    n_threads: int


def share_cores(n_parties: int) -> list[Share]:
    """Divide the cores of this thread over this process and its workers."""
    cores = sorted(os.sched_getaffinity(0))
    quota = _cgroup_cores()
    if len(cores) < n_parties:
        return [Share((), 1)] * n_parties
    shares = []
    for k in range(n_parties):
        first, end = (len(cores) * i // n_parties for i in (k, k + 1))
        n_threads = end - first
        if quota is not None and quota < len(cores):
            n_threads = max(1, min(n_threads, quota // n_parties))
        shares.append(Share(tuple(cores[first:end]), n_threads))
    return shares


def _cgroup_cores() -> int | None:
    """Return how many cores' worth of time a container may use, if it is limited."""
    quota = _cgroup.cpu_quota()
    return None if quota is None else max(1, int(quota))


def environment(
    n_threads: int, role: Role = REPLICA
) -> tuple[dict[str, str], dict[str, str | None]]:
    """Return a worker's environment, and what of it a worker is to restore."""
    environ = dict(os.environ)
    for name in _BINDING:
        environ.pop(name, None)  # each worker has its cores already
    changed = {
        "PYTHONPATH": os.pathsep.join(str(path) or os.curdir for path in sys.path),
        worker_main.SAFE_PATH: "1",
    }
    restored = {name: os.environ.get(name) for name in changed}
    environ.update(changed)
    environ["OMP_NUM_THREADS"] = environ["MKL_NUM_THREADS"] = str(n_threads)
    if not role.is_program:
        environ[WORKER_VARIABLE] = "1"
        # Freed memory is kept, whatever its size: a step needs as much as the last
        # one, and fresh pages cost more than filling them.
        environ["MALLOC_TRIM_THRESHOLD_"] = _MANY_BYTES
        environ["MALLOC_MMAP_MAX_"] = "0"
    return environ, restored


def command(fds: list[int], handler: str) -> list[str]:
    """Return a worker's command line."""
    executable = spawn.get_executable()
    if not executable:
        raise RuntimeError(
            "worker processes need a Python interpreter, and sys.executable names "
            "none: call multiprocessing.set_executable(path) first"
        )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    flags = [flag for flag in flags if flag not in _HERMETIC_FLAGS]
    numbers = [str(fd) for fd in fds]
    return [
        os.fsdecode(executable),
        *flags,
        "-m",
        worker_main.__name__,
        *numbers,
        handler,
    ]


def first_payload(
    share: Share, restored: dict[str, str | None], role: Role = REPLICA
) -> bytes:
    """Return what a worker receives before anything else: see ``main.prepare``."""
    surroundings = {
        "cores": share.cores,
        "threads": share.n_threads,
        "path": [str(path) for path in sys.path],
        "argv": [str(argument) for argument in getattr(sys, "argv", [""])],
        "environ": restored,
        "is_program": role.is_program,
    }
    return json.dumps(surroundings).encode()
