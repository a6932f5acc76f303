"""Checks of the operating system: cores, limits, processes, the host's name.

Functions that read files take the folder that stands for ``/``.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from paceline import _cgroup
from paceline._cli.doctor.finding import (
    Finding,
    count,
    describe,
    ok,
    problem,
    size,
    warning,
)

_ROOT = Path("/")
_UNLIMITED = resource.RLIM_INFINITY


# ---- cores --------------------------------------------------------------------------


@dataclass(frozen=True)
class Cores:
    """The machine's cores, those of the affinity, the cgroup's quota, NUMA nodes."""

    n_machine: int
    n_affinity: int
    quota: float | None
    n_nodes: int = 1

    @property
    def n_usable(self) -> float:
        """How many can work at the same time."""
        return min(self.n_affinity, self.quota or self.n_affinity)


def look_cores(root: Path = _ROOT) -> Cores:
    """Read how many cores this process may use."""
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    n_affinity = len(os.sched_getaffinity(0))
    n_machine = os.cpu_count() or n_affinity
    return Cores(n_machine, n_affinity, _cgroup.cpu_quota(root), max(1, len(nodes)))


def judge_cores(cores: Cores) -> Finding:
    """Judge whether several ranks have a core each."""
    found = f"{cores.n_affinity} of {count(cores.n_machine, 'core')} by affinity"
    if cores.quota is not None:
        found += f", time for {count(cores.quota, 'core')} by the cgroup's quota"
    if cores.n_nodes > 1:
        found += f", {cores.n_nodes} NUMA nodes"
    if cores.n_usable >= 2:
        return ok(found)
    limits = []
    if cores.n_affinity < 2 <= cores.n_machine:
        limits.append("taskset, a cpuset or the scheduler (Slurm: --cpus-per-task)")
    if cores.quota is not None and cores.quota < 2:
        limits.append("the container's quota (docker run --cpus)")
    what = f" Lift the limit: {' and '.join(limits)}." if limits else ""
    return warning(
        found,
        "Ranks on the CPU take turns on less than two cores, which is slower than one "
        f"process; GPUs wait for data loading.{what}",
    )


# ---- limits -------------------------------------------------------------------------

_FEW_DESCRIPTORS = 1024
_LEAST_DESCRIPTORS = 128
_FEW_TASKS = 256


@dataclass(frozen=True)
class Limits:
    """What ulimit shows (None: unlimited), and how many more tasks the cgroup allows.

    Attributes
    ----------
    descriptors, tasks, address_bytes, file_bytes, locked_bytes : int or None
    group_tasks : Usage or None
    is_root : bool
        Whether the limit of tasks does not apply.
    has_infiniband : bool
        Whether there is a network card that locks memory.
    """

    descriptors: int | None = None
    tasks: int | None = None
    address_bytes: int | None = None
    file_bytes: int | None = None
    locked_bytes: int | None = None
    group_tasks: _cgroup.Usage | None = None
    is_root: bool = False
    has_infiniband: bool = False


def look_limits(root: Path = _ROOT) -> Limits:
    """Read the limits of this process."""

    def soft(kind: int) -> int | None:
        limit = resource.getrlimit(kind)[0]
        return None if limit == _UNLIMITED else limit

    return Limits(
        descriptors=soft(resource.RLIMIT_NOFILE),
        tasks=soft(resource.RLIMIT_NPROC),
        address_bytes=soft(resource.RLIMIT_AS),
        file_bytes=soft(resource.RLIMIT_FSIZE),
        locked_bytes=soft(resource.RLIMIT_MEMLOCK),
        group_tasks=_cgroup.tasks(root),
        is_root=os.geteuid() == 0,
        has_infiniband=any((root / "sys/class/infiniband").glob("*")),
    )


def judge_limits(limits: Limits) -> Finding:
    """Judge whether a limit stops ranks."""
    found = f"{_or_no_limit(limits.descriptors)} open files"
    found += f", {_or_no_limit(limits.tasks)} processes"
    advice = []
    n_descriptors = limits.descriptors
    if n_descriptors is not None and n_descriptors < _FEW_DESCRIPTORS:
        advice.append(
            'Ranks and DataLoader fail with "Too many open files": `ulimit -n 65536`.'
        )
    if limits.tasks is not None and limits.tasks < _FEW_TASKS and not limits.is_root:
        advice.append(
            "Processes and threads of this user are limited to fewer than ranks with "
            "their threads need: `ulimit -u unlimited`."
        )
    if limits.group_tasks is not None and limits.group_tasks.free < _FEW_TASKS:
        found += f", {limits.group_tasks.free} more tasks by the cgroup"
        advice.append(
            "The cgroup allows too few processes and threads: docker run "
            "--pids-limit=-1."
        )
    if limits.address_bytes is not None:
        found += f", {size(limits.address_bytes)} of addresses"
        advice.append(
            "CUDA and shared memory reserve many more addresses than they use: "
            "`ulimit -v unlimited`."
        )
    if limits.file_bytes is not None:
        found += f", files of {size(limits.file_bytes)}"
        advice.append(
            "Shared memory counts as a file: no more of it can be made than that. "
            "`ulimit -f unlimited`."
        )
    if limits.locked_bytes is not None and limits.has_infiniband:
        found += f", {size(limits.locked_bytes)} of locked memory"
        advice.append(
            "NCCL locks memory for InfiniBand: `ulimit -l unlimited`, or docker run "
            "--ulimit memlock=-1."
        )
    if not advice:
        return ok(found)
    is_stopped = n_descriptors is not None and n_descriptors < _LEAST_DESCRIPTORS
    return (problem if is_stopped else warning)(found, " ".join(advice))


def _or_no_limit(number: int | None) -> str:
    return "any number of" if number is None else str(number)


# ---- processes ----------------------------------------------------------------------


@dataclass(frozen=True)
class Processes:
    """Why processes cannot be watched, and why hosts cannot be told apart."""

    pidfd_error: str = ""
    host_error: str = ""


def look_processes(root: Path = _ROOT) -> Processes:
    """Open a pidfd, and read what tells this host from others."""
    pidfd_error = host_error = ""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        pidfd_error = describe(error)
    try:
        for kind in ("net", "pid", "user"):
            os.stat(root / "proc/self/ns" / kind)
        (root / "proc/sys/kernel/random/boot_id").read_text()
    except OSError as error:
        host_error = describe(error)
    return Processes(pidfd_error, host_error)


def judge_processes(processes: Processes) -> Finding:
    """Judge whether ranks see each other."""
    found, advice = [], []
    if processes.pidfd_error:
        found.append(f"pidfd_open: {processes.pidfd_error}")
        advice.append(
            "A rank that dies is noticed only once its parent has collected it, and "
            "launch() fails. pidfd_open needs Linux 5.3, and a container whose seccomp "
            "profile allows it, as Docker's does."
        )
    if processes.host_error:
        found.append(processes.host_error)
        advice.append(
            "Ranks cannot tell that they are on one host, so they average by the "
            "process group, which is slower. Mount all of /proc."
        )
    if not found:
        return ok("pidfd_open works, /proc tells hosts and namespaces apart")
    return warning("; ".join(found), " ".join(advice))


# ---- the host's name ----------------------------------------------------------------

_SLOW_SECONDS = 2.0


@dataclass(frozen=True)
class HostName:
    """The name of this host, and what became of looking up its address."""

    name: str
    error: str = ""
    seconds: float = 0.0


def look_host_name() -> HostName:
    """Look up this host's address by its name."""
    name, error_text, began = socket.gethostname(), "", time.monotonic()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        error_text = describe(error)
    return HostName(name, error_text, time.monotonic() - began)


def judge_host_name(host: HostName) -> Finding:
    """Judge whether launchers and Gloo find this host."""
    found = f"{host.name!r} has an address"
    if host.error:
        found = f"{host.name!r}: {host.error}"
    elif host.seconds >= _SLOW_SECONDS:
        found += f", after {host.seconds:.0f} s"
    else:
        return ok(found)
    return warning(
        found,
        "torchrun and Gloo look up this name, and may wait minutes for it. Add it to "
        "/etc/hosts (docker run --hostname), or use torchrun --local-addr 127.0.0.1 "
        "and GLOO_SOCKET_IFNAME=lo on a single host.",
    )
