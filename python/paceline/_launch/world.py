"""What a rank knows of its world, and how it waits for the other ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline import _messages
from paceline._compat import torch_core, torch_groups
from paceline._errors import PeerError, PeerTimeoutError
from paceline._launch.variables import Launcher

_ARRIVED = "paceline/barrier"


@dataclass(frozen=True)
class World:
    """The world as one of its processes sees it; :func:`paceline.init` returns it.

    Attributes
    ----------
    rank : int
        From 0 on; -1 for the evaluator of ``TF_CONFIG``, which is outside the world.
    world_size : int
        The number of ranks.
    local_rank : int
        Among the ranks of this host; -1 if it is unknown, as in a process group that
        your program made itself, without ``LOCAL_RANK``.
    device : torch.device
        Where this rank's model belongs: its GPU, or the CPU.
    launcher : str
        The launcher whose variables were used: ``"torchrun"``, ``"environment"``
        (``RANK`` and the like, set by other means), ``"openmpi"``, ``"mvapich"``,
        ``"mpich"``, ``"submitit"``, ``"tf_config"``, ``"slurm"``, or ``"none"``;
        ``"unknown"`` if the process group is not the one that the variables describe.

    Examples
    --------
    >>> import torch, paceline
    >>> world = paceline.init()
    >>> world.print(f"one of {world.world_size}", world.device)
    one of 1 cpu
    >>> torch.distributed.destroy_process_group()
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    launcher: Launcher

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0, as ``print`` does, and nothing elsewhere."""
        if self.is_main:
            print(*values, **options)

    def log_filter(self, record: logging.LogRecord) -> bool:
        """Pass all records on rank 0, elsewhere from WARNING on; a handler's filter."""
        return self.is_main or record.levelno >= logging.WARNING

    @torch_core.uncompiled
    def barrier(self, timeout: timedelta | float | None = None) -> None:
        """Wait until every rank has called this.

        Parameters
        ----------
        timeout : datetime.timedelta or float, optional
            How long to wait, from a millisecond to the process group's timeout, which
            is the default; a number is in seconds.

        Raises
        ------
        paceline.PeerError, paceline.PeerTimeoutError
            If a rank ends or is late; the error names the ranks that have not come.
            The process group cannot be used any more: end the program.
        ValueError
            If `timeout` is another number.  In a rank without a process group.

        Examples
        --------
        >>> import torch, paceline
        >>> paceline.init().barrier(timeout=60)
        >>> torch.distributed.destroy_process_group()
        """
        rank, size = torch_groups.rank_and_size()
        if self.rank < 0 or size == 1:
            return
        _messages.turn.refuse("barrier()")
        torch_groups.wait_for_gloo_at_exit()
        group = torch_groups.default_group()
        options = _read_timeout(timeout, torch_groups.group_timeout_seconds(group))
        store, n_calls = torch_groups.group_store(group), None  # MPI's groups have none
        is_on_gpu = "cpu" not in torch_groups.backends_by_device()
        token = torch.zeros(1, device="cuda" if is_on_gpu else "cpu")
        try:
            n_calls = store and store.add(f"{_ARRIVED}/{rank}", 1)
            work = dist.all_reduce(token, async_op=True)
            work.wait(*options)
            token.cpu()
        except RuntimeError as error:
            if not torch_groups.is_lost_peer(error):
                raise
            kind = PeerTimeoutError if torch_groups.is_timeout(error) else PeerError
            late = _late_ranks(store, n_calls)
            raise kind(f"rank {rank}: barrier() waits for {late} ({error})") from error

    @contextmanager
    def first(self, *, on_each_host: bool = False) -> Iterator[None]:
        """Let rank 0 run the body of a ``with`` alone, then the other ranks.

        So rank 0 downloads or prepares files, and the others find them.  All ranks must
        come to it; the others wait for the process group's timeout at most.  The body
        may not wait for other ranks, as `mean` and `backward` do.

        Parameters
        ----------
        on_each_host : bool, default False
            Whether the local rank 0 of each host goes first, for files that hosts do
            not share.

        Raises
        ------
        paceline.PeerError, paceline.PeerTimeoutError
            If a rank ends or is late.
        Exception
            On the other ranks what the body raised on a rank that went first, as the
            nearest class that Python or Paceline has.
        RuntimeError
            If the body calls `first`, `barrier`, `mean`, `gather` or `save(rng=True)`.

        Examples
        --------
        >>> import torch, paceline
        >>> world = paceline.init()
        >>> with world.first():
        ...     print("download, or find what rank 0 has downloaded")
        download, or find what rank 0 has downloaded
        >>> torch.distributed.destroy_process_group()
        """
        if self.rank < 0 or torch_groups.rank_and_size()[1] == 1:
            yield
            return
        if on_each_host and self.local_rank < 0:
            raise ValueError(
                "first(on_each_host=True) needs the local rank, which this world does "
                "not know: set LOCAL_RANK, or call paceline.init() to make the group"
            )
        goes_first = (self.local_rank if on_each_host else self.rank) == 0
        problem = None
        _messages.turn.refuse("first()")
        if goes_first:
            _messages.turn.goes_first = True
            try:
                yield
            except Exception as error:  # any error: the other ranks must learn of it
                problem = error
            finally:
                _messages.turn.goes_first = False
        own = problem and _messages.Failure.of(problem)
        message = _messages.pack(("first()", own))
        told = _messages.exchange("first()", message, _messages.Failure | None)
        if problem is not None:
            raise problem
        if goes_first:
            return
        for rank, failure in enumerate(told):
            if failure is not None:
                raise failure.exception(rank)
        yield


World.__module__ = "paceline"


def _read_timeout(timeout: Any, most: float) -> list[timedelta]:
    """Return the arguments with which to wait for work."""
    if timeout is None:
        return []
    seconds = timeout
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    if not 0.001 <= seconds <= most:
        raise ValueError(
            f"timeout is {timeout!r}: give seconds, from 0.001 to the process group's "
            f"timeout ({most:g}), which init(timeout=...) sets"
        )
    return [timedelta(seconds=seconds)]


def _late_ranks(store: Any, n_calls: int | None) -> str:
    """Name the ranks that have called less often, as far as the store can tell."""
    late = []
    with suppress(RuntimeError):  # the process that has the store may be gone
        for rank in range(dist.get_world_size() if n_calls else 0):
            if store.add(f"{_ARRIVED}/{rank}", 0) < n_calls:
                late.append(rank)
    if not late:
        return "another rank"
    names = ", ".join(map(str, late[:10])) + (", ..." if len(late) > 10 else "")
    return f"rank{'s' * (len(late) > 1)} {names}"
