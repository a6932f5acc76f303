"""Write scalars to TensorBoard and Weights & Biases, with one call per step.

Neither library is imported here.  A callback takes a writer or a run that the caller
made, and calls a single method of it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import distributed as dist

_NS_PER_MS = 1e6


class _Callback(ABC):
    """Counts steps, and writes an entry on rank 0 every `every` steps."""

    _sink = ""  # the name of the parameter, and its method that writes
    _method = ""
    _made_by = ""

    def __init__(
        self,
        target: Any,
        model: torch.nn.Module | None = None,
        every: int = 50,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"every is {every!r}: give the number of steps from one entry to the "
                "next, 1 or more"
            )
        in_world = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if in_world else 0
        self._world_size = dist.get_world_size() if in_world else 1
        if self._rank == 0 and not callable(getattr(target, self._method, None)):
            raise TypeError(
                f"{self._sink} is a {type(target).__name__}, which has no "
                f"{self._method}(): give what {self._made_by} returns"
            )
        self._target = target
        self._read = getattr(model, "_get_ddp_logging_data", None)
        set_rate = getattr(model, "_set_ddp_runtime_logging_sample_rate", None)
        if self._rank == 0 and set_rate is not None:
            set_rate(every)
        self._every = every
        self._n_steps = self._n_samples = 0
        self._began: float | None = None  # None until the first step ends

    def __call__(self, step: int, samples: int = 0, **scalars: Any) -> None:
        """Count a step; write an entry if `every` steps have passed.

        Parameters
        ----------
        step : int
            The number of the step, which its entry gets.
        samples : int, optional
            Samples of this rank in this step.  Without it, no rate is written.
        **scalars
            Your own numbers, or tensors of one element.  Tensors are read only when an
            entry is written, so that other steps do not wait for a GPU.

        Raises
        ------
        ValueError
            If a scalar of an entry is not a number.
        """
        if self._rank != 0:
            return
        self._n_steps += 1
        self._n_samples += samples
        if self._n_steps < self._every and self._began is not None:
            return
        found = {name: _number(name, value) for name, value in scalars.items()}
        now = time.perf_counter()
        if self._began is not None:
            found |= self._measured(now - self._began)
        self._began, self._n_steps, self._n_samples = now, 0, 0
        self._write(found, int(step))

    def _measured(self, seconds: float) -> dict[str, float]:
        """Return the times and rates of the steps since the last entry."""
        step_ms = seconds / self._n_steps * 1e3
        found = {"paceline/step_ms": step_ms}
        if self._n_samples:
            rate = self._n_samples * self._world_size / seconds
            found["paceline/samples_per_second"] = rate
        entries = self._read() if self._read is not None else {}
        if "backward_comm_time" in entries:
            exposed = (
                entries["backward_comm_time"]
                - entries["backward_compute_comm_overlap_time"]
            ) / _NS_PER_MS
            found["paceline/exposed_comm_ms"] = exposed
            found["paceline/exposed_comm_share"] = min(exposed / step_ms, 1.0)
        return found

    @abstractmethod
    def _write(self, scalars: dict[str, float], step: int) -> None: ...


class TensorBoard(_Callback):
    """Write scalars to TensorBoard: ``log(step, samples=len(x), loss=loss)``.

    Only rank 0 writes.  Entries have your scalars, ``paceline/step_ms`` (the mean time
    of a step since the last entry) and ``paceline/samples_per_second`` (of all ranks).
    With a `DistributedDataParallel` they also have ``paceline/exposed_comm_ms`` (the
    communication that backward did not hide in the last measured step) and
    ``paceline/exposed_comm_share`` (its share of the time of a step).

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter or similar
        An object with ``add_scalar(name, value, step)``.  May be None on other ranks.
    model : torch.nn.Module, optional
        The wrapper, of Paceline or torch; without one, communication is not written.
    every : int, default 50
        Steps from one entry to the next.  The first step's entry has only your scalars.
        The model also measures every such step.

    Raises
    ------
    TypeError
        If the `writer` of rank 0 has no ``add_scalar()``.
    ValueError
        If `every` is less than 1.

    Examples
    --------
    >>> import torch
    >>> from paceline.callbacks import TensorBoard
    >>> class Printer:
    ...     def add_scalar(self, name, value, step):
    ...         print(step, name, value)
    >>> log = TensorBoard(Printer(), every=2)
    >>> log(0, loss=torch.tensor(0.5))
    0 loss 0.5
    >>> log(1, loss=torch.tensor(0.25))

    Notes
    -----
    Times are those of rank 0.  The rate assumes that each rank has as many samples.
    A callback does not communicate: call it on every rank, or only on rank 0.
    """

    _sink = "writer"
    _method = "add_scalar"
    _made_by = "torch.utils.tensorboard.SummaryWriter()"

    def __init__(
        self, writer: Any, model: torch.nn.Module | None = None, every: int = 50
    ) -> None:
        super().__init__(writer, model, every)

    def _write(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._target.add_scalar(name, value, step)


class WandB(_Callback):
    """Write scalars to Weights & Biases: like `TensorBoard`, with one call per entry.

    Parameters
    ----------
    run : wandb.Run or similar
        An object with ``log(scalars, step=step)``.  May be None on other ranks.
    model : torch.nn.Module, optional
        As for `TensorBoard`.
    every : int, default 50
        As for `TensorBoard`.

    Raises
    ------
    TypeError
        If the `run` of rank 0 has no ``log()``.
    ValueError
        If `every` is less than 1.

    Examples
    --------
    >>> from paceline.callbacks import WandB
    >>> class Printer:
    ...     def log(self, scalars, step):
    ...         print(step, scalars)
    >>> log = WandB(Printer())
    >>> log(0, samples=32, loss=0.5)
    0 {'loss': 0.5}
    """

    _sink = "run"
    _method = "log"
    _made_by = "wandb.init()"

    def __init__(
        self, run: Any, model: torch.nn.Module | None = None, every: int = 50
    ) -> None:
        super().__init__(run, model, every)

    def _write(self, scalars: dict[str, float], step: int) -> None:
        self._target.log(scalars, step=step)


def _number(name: str, value: Any) -> float:
    try:
        return float(value.item() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = type(value).__name__
        if isinstance(value, torch.Tensor):
            what = f"tensor of {value.numel()} elements"
        raise ValueError(
            f"{name} is a {what}: give one number, as in {name}={name}.mean()"
        ) from error
