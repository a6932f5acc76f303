"""``paceline.init()``: join the world that a launcher has described."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline import _environment
from paceline._compat import torch_groups
from paceline._launch import variables
from paceline._launch.launchers import find_launch
from paceline._launch.variables import Launch
from paceline._launch.world import World
from paceline._waiting import Patience

_GPU_BACKEND = "cpu:gloo,cuda:nccl"
_CPU_BACKEND = "gloo"
_PREFIX = "paceline/init"
_ALL_JOINED = f"{_PREFIX}/all"
_POLL_SECONDS = 0.005

_added: dict[str, str] = {}
"""The variables that `init` has set because no launcher did."""


def init(
    *, backend: str | None = None, timeout: timedelta | float | None = None
) -> World:
    """Join the world that the launcher's environment variables describe.

    It makes torch's default process group, so that one script runs under torchrun,
    SLURM's srun, the mpirun of Open MPI, MVAPICH2, MPICH and Intel MPI, submitit,
    TensorFlow's ``TF_CONFIG``, and as plain ``python train.py``, which is a world of
    one.  If the group exists already, the call changes nothing.

    Parameters
    ----------
    backend : str, optional
        As for ``torch.distributed.init_process_group``.  By default
        ``"cpu:gloo,cuda:nccl"`` if torch sees a GPU, else ``"gloo"``.  If `backend`
        names neither nccl nor cuda, the device is the CPU.
    timeout : datetime.timedelta or float, optional
        How long ranks wait for one another; a number is in seconds.  Default: torch's.
        A group that exists already keeps its own.

    Returns
    -------
    paceline.World
        Rank, world size, local rank, device and launcher.

    Raises
    ------
    ValueError
        If variables are wrong, contradict one another, or some are missing, as in one
        of several barrier tasks of Spark or workers of Ray Train that neither
        TorchDistributor nor TorchTrainer has started; if the process group exists
        already, with another backend than `backend`.
    RuntimeError
        If this rank has no GPU, or not all ranks join.

    Examples
    --------
    >>> import torch, paceline
    >>> world = paceline.init()
    >>> world.rank, world.world_size, world.launcher
    (0, 1, 'none')
    >>> module = torch.nn.Linear(8, 1).to(world.device)
    >>> model = paceline.DistributedDataParallel(module)
    >>> torch.distributed.destroy_process_group()

    Notes
    -----
    The first set in this list counts; after 1 a set of one rank gives way to others:

    1. ``RANK`` and ``WORLD_SIZE``, with ``MASTER_ADDR`` and ``MASTER_PORT``, set by
       torchrun or by you.  Only some of them, with no launcher below, are an error;
    2. ``OMPI_COMM_WORLD_RANK`` and ``OMPI_COMM_WORLD_SIZE``; the same of ``MV2_``;
       ``PMI_RANK`` and ``PMI_SIZE``, unless srun has set them itself;
    3. ``SUBMITIT_LOCAL_GLOBALID`` and ``SUBMITIT_LOCAL_NTASKS``;
    4. ``TF_CONFIG``: the chief is rank 0, workers follow.  An evaluator gets the rank
       -1, and no process group: it does not train;
    5. ``SLURM_PROCID`` in a step of srun.  A program in a shell of salloc, or in the
       script of sbatch without srun, is a world of one.

    ``MASTER_ADDR`` and ``MASTER_PORT`` count with every launcher.  If they are not set,
    rank 0's address is that of ``TF_CONFIG``, the first host of SLURM's step, or under
    mpirun this host, if all ranks are on it; for several hosts mpirun needs them.  The
    port is derived from the job's number; MPICH's mpirun has none and takes 29500, so
    two such jobs on one host need different ``MASTER_PORT``.

    Libraries and child processes read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.  The call sets those that
    are missing and known, and changes none.  Without a launcher it sets none.

    The GPU is the one numbered by the local rank, or the only one that
    ``CUDA_VISIBLE_DEVICES`` leaves; it becomes torch's current device.  Rank 0 prints a
    line to ``stderr``.
    """
    if dist.is_initialized():
        return _present_world(backend)
    launch = find_launch(_variables_of_launchers())
    if launch.rank < 0:
        return _world_outside(launch, backend)
    return join(launch, backend, timeout, is_quiet=False)


def join(
    launch: Launch,
    backend: str | None,
    timeout: timedelta | float | None,
    *,
    is_quiet: bool,
) -> World:
    """Join the world of a launch; rank 0 prints a line unless `is_quiet` is set."""
    _check_backend(backend)
    uses_gpu = computes_on_gpu(backend)
    if launch.local_rank is not None:
        _choose_device(uses_gpu, launch.local_rank)  # fail before others wait
    backend = backend or (_GPU_BACKEND if uses_gpu else _CPU_BACKEND)
    added = _export_variables(launch)
    try:
        _make_group(launch, backend, timeout)
        local_rank, n_hosts = _exchange_hosts(launch)
        device = _choose_device(uses_gpu, local_rank)
    except BaseException:
        for name in added:
            os.environ.pop(name, None)
            _added.pop(name, None)
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    _export_variables(dataclasses.replace(launch, local_rank=local_rank))
    if launch.rank == 0 and not is_quiet:
        _print_world(launch, backend, n_hosts)
    return World(launch.rank, launch.world_size, local_rank, device, launch.launcher)


def _make_group(
    launch: Launch, backend: str, timeout: timedelta | float | None
) -> None:
    """Make torch's default process group."""
    size = launch.world_size
    options: dict[str, Any] = {"rank": launch.rank, "world_size": size}
    _environment.agreed_start = ""
    if timeout is not None:
        if not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=timeout)
        options["timeout"] = timeout
    try:
        if size == 1:
            options["store"] = dist.HashStore()  # type: ignore[attr-defined]  # no port
        elif _is_store_of_launcher():
            options["store"] = _store_of_attempt(launch, options.get("timeout"))
        else:
            options["init_method"] = "env://"
        dist.init_process_group(backend, **options)
    except (RuntimeError, TimeoutError) as error:
        where, hint = "", ""
        if size > 1:
            where = f" at {launch.master_addr}:{launch.master_port}"
        if size > 1 and isinstance(error, dist.DistError):
            hint = (
                "; rank 0 listens there: start all ranks, check that they reach it, "
                "or set another MASTER_ADDR and MASTER_PORT on every rank"
            )
        raise RuntimeError(
            f"rank {launch.rank} of {size} (launcher: {launch.launcher}) could not "
            f"join the world{where}: {error}{hint}"
        ) from error


def _is_store_of_launcher() -> bool:
    """Tell whether the launcher's process has the store, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _store_of_attempt(launch: Launch, timeout: timedelta | None) -> Any:
    """Return torchrun's store, without the keys of earlier starts."""
    timeout = timeout or dist.default_pg_timeout
    assert launch.master_addr is not None
    assert launch.master_port is not None
    store = dist.TCPStore(  # type: ignore[attr-defined]
        launch.master_addr, launch.master_port, is_master=False, timeout=timeout
    )
    prefix = agree_on_prefix(
        store, launch.rank, launch.world_size, timeout.total_seconds()
    )
    _environment.agreed_start = prefix
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def agree_on_prefix(store: Any, rank: int, size: int, seconds: float) -> str:
    """Return the prefix that only the ranks of this start put before their keys.

    They share `store`, which torchrun keeps across restarts of the ranks, with all keys
    that dead ranks have written: new ranks would read Gloo's old addresses and try to
    reach them.  The ranks agree in the same store, in spite of old answers: a rank
    counts its starts, and reads only the answer to the last one.  torchrun's own count
    does not do: it differs between hosts.

    ::

        rank r    starts/r += 1                              <prefix>/r = "there"
        rank 0       answer/r/<starts> = the prefix ...  until all are there

    Raise TimeoutError if some do not come within `seconds`; on rank 0 the error names
    them.
    """
    patience = Patience(seconds)
    if rank == 0:
        return _bring_together(store, size, patience)
    n_starts = store.add(f"{_PREFIX}/starts/{rank}", 1)
    answer = f"{_PREFIX}/answer/{rank}/{n_starts}"
    _await(lambda: store.check([answer]), patience, lambda: "rank 0 does not answer")
    prefix: str = store.get(answer).decode(errors="replace")
    store.set(f"{prefix}/{rank}", "there")
    return prefix


def _bring_together(store: Any, size: int, patience: Patience) -> str:
    """Act as rank 0: answer each rank until it has received the right answer."""
    prefix = f"{_PREFIX}/{secrets.token_hex(8)}"
    missing = set(range(1, size))

    def are_all_there() -> bool:
        for rank in sorted(missing):
            starts = f"{_PREFIX}/starts/{rank}"
            if store.check([f"{prefix}/{rank}"]):
                missing.discard(rank)
            elif store.check([starts]):  # the last one may be an earlier rank's
                n_starts = store.get(starts).decode(errors="replace")
                store.set(f"{_PREFIX}/answer/{rank}/{n_starts}", prefix)
        return not missing

    _await(are_all_there, patience, lambda: f"ranks {sorted(missing)} have not come")
    return prefix


def _await(
    is_done: Callable[[], bool], patience: Patience, describe: Callable[[], str]
) -> None:
    while not is_done():
        if patience.left() < 0:
            raise TimeoutError(describe())
        time.sleep(_POLL_SECONDS)


def _exchange_hosts(launch: Launch) -> tuple[int, int | None]:
    """Return this rank's local rank and, on rank 0, how many hosts there are.

    Every rank writes its host; only ranks that need the hosts read them, since each
    reads as many keys as there are ranks.  All wait for the last rank: Gloo fails on
    ranks that still connect to one that has ended.
    """
    rank, size, known = launch.rank, launch.world_size, launch.local_rank
    if size == 1:
        return known or 0, 1
    store = torch_groups.group_store(torch_groups.default_group())
    if store is None:  # MPI's groups have none
        return -1 if known is None else known, None
    keys = [f"{_PREFIX}/host/{other}" for other in range(size)]
    store.set(keys[rank], _environment.nccl_host())
    if rank != 0 and known is not None:
        # If rank 0 has the store, it may have ended with it, once all had joined.
        with suppress(dist.DistNetworkError):
            store.wait([_ALL_JOINED])
        return known, None
    hosts = store.multi_get(keys)  # waits for them
    if rank == 0:
        store.set(_ALL_JOINED, "")
    if known is None:
        known = hosts[:rank].count(hosts[rank])
    return known, len(set(hosts))


def _print_world(launch: Launch, backend: str, n_hosts: int | None) -> None:
    size = launch.world_size
    words = f"paceline: {size} rank{'s' * (size > 1)}"
    if n_hosts is not None:
        words += f" on {n_hosts} host{'s' * (n_hosts > 1)}"
    words += f", backend {backend}, launcher {launch.launcher}"
    if launch.note:
        words += f" ({launch.note})"
    print(words, file=sys.stderr, flush=True)


# ---- the environment -----------------------------------------------------------------


def _variables_of_launchers() -> dict[str, str]:
    """Return the environment without the variables that an earlier call added."""
    return {k: v for k, v in os.environ.items() if _added.get(k) != v}


def _export_variables(launch: Launch) -> list[str]:
    """Set the variables that are missing; return their names."""
    added = []
    for name in variables.ALL:
        value = getattr(launch, name.lower())
        is_known = value is not None and value != -1
        if launch.launcher != "none" and is_known and not os.environ.get(name):
            os.environ[name] = _added[name] = str(value)
            added.append(name)
    return added


# ---- devices, and worlds that need no joining ----------------------------------------


def _names_gpu(backend: str | None) -> bool:
    return backend is None or "nccl" in backend.lower() or "cuda" in backend.lower()


def _check_backend(backend: str | None) -> None:
    if not isinstance(backend, str | None):
        raise TypeError(f"backend is {backend!r}: give a name such as 'gloo', or None")
    known = [name for name in dist.Backend.backend_list if name != "undefined"]
    for part in (backend or "gloo").lower().split(","):
        if (name := part.rpartition(":")[2]) not in known:
            raise ValueError(
                f"backend is {backend!r}, and torch has no {name!r}: leave it out, or "
                f"give 'gloo' or {_GPU_BACKEND!r} (torch has {', '.join(known)})"
            )


def computes_on_gpu(backend: str | None) -> bool:
    """Tell whether ranks compute on GPUs; raise if they should but torch sees none."""
    if not _names_gpu(backend):
        return False
    has_gpu = torch.cuda.is_available()
    if backend is not None and not has_gpu:
        raise RuntimeError(
            f"backend is {backend!r}, but torch sees no GPU: leave it out, or give "
            "'gloo', to train on the CPU"
        )
    return has_gpu


def _choose_device(uses_gpu: bool, local_rank: int) -> torch.device:
    """Return a rank's device; make a GPU torch's current device."""
    if not uses_gpu:
        return torch.device("cpu")
    n_gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = 0 if n_gpus == 1 and visible else local_rank
    if not 0 <= index < n_gpus:
        raise RuntimeError(
            f"local rank {local_rank} has no GPU: torch sees {n_gpus} "
            f"(CUDA_VISIBLE_DEVICES={visible}): start at most {n_gpus} ranks per host, "
            "or train on the CPU by paceline.init(backend='gloo')"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _world_outside(launch: Launch, backend: str | None) -> World:
    """Return the world for a process outside it: no group, a device if there is one."""
    local_rank = launch.local_rank or 0
    has_gpu = _names_gpu(backend) and local_rank < torch.cuda.device_count()
    device = _choose_device(has_gpu, local_rank)
    print(
        f"paceline: evaluator, outside the world (of size {launch.world_size}), "
        f"launcher {launch.launcher}",
        file=sys.stderr,
        flush=True,
    )
    return World(-1, launch.world_size, local_rank, device, launch.launcher)


def _present_world(backend: str | None) -> World:
    """Return what is known of a process group that exists already."""
    config = torch_groups.backends_by_device()
    parts = backend.lower().split(",") if backend else []
    if not all(part in config for part in parts):
        raise ValueError(
            f"backend is {backend!r}, but the process group exists already, with "
            f"{config!r}: call paceline.init() before the code that makes it, or leave "
            "backend out"
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if "nccl" in config and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    launch = _launch_of(rank, size)
    local_rank = launch.local_rank
    if local_rank is None:
        local_rank = 0 if size == 1 else -1 if device.index is None else device.index
    return World(rank, size, local_rank, device, launch.launcher)


def _launch_of(rank: int, size: int) -> Launch:
    """Return the launch of an existing group, as far as variables describe it."""
    try:
        launch = find_launch(_variables_of_launchers())
    except ValueError:
        launch = Launch("unknown", rank, size)
    if (launch.rank, launch.world_size) != (rank, size):
        launch = Launch("unknown", rank, size)
    text = os.environ.get("LOCAL_RANK", "")
    if launch.local_rank is None and text.isascii() and text.isdigit():
        launch = dataclasses.replace(launch, local_rank=int(text))
    return launch
