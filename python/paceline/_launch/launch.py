"""``paceline.launch()``: run a function as the ranks of a new world."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, overload

import torch

from paceline._launch import init, payloads, ranks
from paceline._launch.launchers import find_launch
from paceline._launch.messages import Call

P = ParamSpec("P")
T = TypeVar("T")
Seconds = timedelta | float | None


# A ParamSpec allows no keyword beside it: these two do not check fn's own.
@overload
def launch(
    fn: Callable[..., T],
    n: int | None = None,
    *args: Any,
    backend: str | None,
    timeout: Seconds = None,
    **kwargs: Any,
) -> list[T]: ...
@overload
def launch(
    fn: Callable[..., T],
    n: int | None = None,
    *args: Any,
    timeout: Seconds,
    **kwargs: Any,
) -> list[T]: ...
@overload
def launch(
    fn: Callable[P, T], n: int | None = None, *args: P.args, **kwargs: P.kwargs
) -> list[T]: ...
def launch(  # type: ignore[misc]  # fn may have such keywords
    fn: Callable[..., T],
    n: int | None = None,
    *args: Any,
    backend: str | None = None,
    timeout: Seconds = None,
    **kwargs: Any,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` as `n` ranks on this machine; return the results.

    It works in a notebook's cell, in a script without a main guard and in a test.  Each
    rank is a fresh process; the caller is not a rank.  When `fn` begins, each rank has
    joined torch's default process group: do not make it in `fn`.
    ``torch.distributed.get_rank()`` returns the rank, and :func:`paceline.init` the
    world with the rank's device.

    Parameters
    ----------
    fn : callable
        The function that each rank calls.  Functions and classes of a cell or of the
        script are sent by value with the globals they use; those of other modules are
        imported.
    n : int, optional
        The number of ranks.  By default one per GPU that torch sees, or one rank if it
        sees none.
    *args, **kwargs
        For `fn`, pickled (cloudpickle); each rank gets its own copy.  Tensors on GPUs
        arrive on the CPU.  Pass a keyword that this function has itself by
        ``functools.partial``.
    backend, timeout
        As for :func:`paceline.init`.

    Returns
    -------
    list
        Copies of what the ranks returned, by rank; tensors on GPUs arrive on the CPU,
        and a ``DistributedDataParallel``, which needs a process group, as its module.
        None for a rank that calls ``sys.exit(0)``.

    Raises
    ------
    paceline.RankError
        If a rank raises, or its process ends early, for instance killed for lack of
        memory.  The error names the rank that failed first; its cause is that rank's
        exception.  The other ranks are stopped at once.  Also, once all have returned,
        if a result cannot be pickled or unpickled; `results` has those of other ranks.
    TypeError
        If `fn` is not callable, or it or an argument cannot be pickled.
    ValueError
        If `n` is less than 1, or more than there are GPUs while ranks compute on them.
    RuntimeError
        If the caller is itself one of several ranks; if `backend` needs GPUs and torch
        sees none.
    KeyboardInterrupt
        If you press Ctrl-C, or stop the cell; all ranks have ended by then.

    Examples
    --------
    >>> import paceline
    >>> def train(steps):
    ...     import torch
    ...
    ...     world = paceline.init()
    ...     module = torch.nn.Linear(8, 1).to(world.device)
    ...     model = paceline.DistributedDataParallel(module)
    ...     for _ in range(steps):
    ...         model(torch.randn(4, 8, device=world.device)).sum().backward()
    ...     return world.rank, float(module.bias.grad)
    >>> paceline.launch(train, 2, 1)
    [(0, 4.0), (1, 4.0)]

    Notes
    -----
    Ranks have the variables that torchrun sets: ``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, a free
    port that the caller holds.  ``OMP_NUM_THREADS`` is the rank's share of the cores.

    The ranks' output appears in the caller's ``sys.stdout`` and ``sys.stderr``, line by
    line: rank 0's unchanged, others' after a prefix such as ``[rank 1]``.  Their
    standard input is empty, so a breakpoint in `fn` fails.

    Ranks meet and use Gloo on the loopback; ``GLOO_SOCKET_IFNAME`` moves Gloo.  A store
    that `fn` makes itself listens on every interface, as torch's stores do.

    A rank ends when its threads have ended.  If the caller ends, in whatever way, its
    ranks end too, even if they are stopped.  The processes that a rank started end with
    it, except those in another session or process group (``start_new_session=True``).
    """
    if not callable(fn):
        raise TypeError(
            f"fn is of type {type(fn).__name__}: launch() takes the function itself "
            "and its arguments, as in launch(train, 2, data)"
        )
    n = _count_ranks(n, backend)
    _check_caller()
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    packed = payloads.pack_call(fn, args, kwargs)
    argv = [str(each) for each in getattr(sys, "argv", [""])]
    return ranks.run(n, Call(packed, backend, seconds, ranks.cell_sources(), argv))


def _count_ranks(n: Any, backend: str | None) -> int:
    """Return the number of ranks; raise if it is not possible."""
    n_gpus = torch.cuda.device_count() if init.computes_on_gpu(backend) else 0
    if n is None:
        return max(n_gpus, 1)
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(
            f"n is of type {type(n).__name__}, but it is the number of ranks: "
            "launch(fn, 2, ...) calls fn(...) on two"
        )
    if n < 1:
        raise ValueError(f"n is {n}: at least one rank is needed")
    if n > n_gpus > 0:
        raise ValueError(
            f"n is {n}, but torch sees {n_gpus} GPU{'s' * (n_gpus > 1)}: start at most "
            "one rank per GPU, or train on the CPU by backend='gloo'"
        )
    return n


def _check_caller() -> None:
    """Raise if this process is itself one of several ranks."""
    try:
        found = find_launch(os.environ)
    except ValueError:
        return  # incomplete variables, which ranks do not get
    if found.world_size > 1:
        raise RuntimeError(
            f"launch() was called in rank {found.rank} of {found.world_size} "
            f"(launcher: {found.launcher}), and each rank would start a separate "
            "world: call the function itself, or start the program by plain python; if "
            "no launcher has started it, unset RANK and WORLD_SIZE"
        )
