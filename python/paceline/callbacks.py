"""Scalars of a training for TensorBoard and Weights & Biases, by one call a step.

Neither is imported here: a callback takes the writer or the run that you have made, and
calls one method of it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import distributed as dist

_NS_PER_MS = 1e6


class _Callback(ABC):
    """Counts steps, and writes on rank 0 every so many of them."""

    _sink = ""  # what is written to, and the method of it that is called
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
        self._began: float | None = None  # no time before the first step is known

    def __call__(self, step: int, samples: int = 0, **scalars: Any) -> None:
        """Count a step; write it, if its turn has come.

        Parameters
        ----------
        step : int
            Its number, which entries get.
        samples : int, optional
            What this rank has trained on in this step; without it no rate is written.
        **scalars
            Numbers of your own, or tensors of one element, which are read only when
            they are written: no other step waits for a GPU.

        Raises
        ------
        ValueError
            If one of them is no number when it is to be written.
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
        """Return what the steps since the last entry took."""
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

    Beside your own it writes, on rank 0 alone: ``paceline/step_ms``, the mean time of
    the steps since the last entry; ``paceline/samples_per_second``, of all ranks;
    and of a `DistributedDataParallel` ``paceline/exposed_comm_ms``, the communication
    that backward did not hide in the last measured step, with
    ``paceline/exposed_comm_share``, that against the time of a step.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter or similar
        Its ``add_scalar(name, value, step)`` is called.  None will do on other ranks.
    model : torch.nn.Module, optional
        The wrapped model, by Paceline or by torch; others have no communication.
    every : int, default 50
        Steps from one entry to the next; the first step is one, of your scalars alone.
        As often the model measures a step, which takes a callback a parameter then.

    Raises
    ------
    TypeError
        If rank 0 has no such writer.
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
    The times are of rank 0, and ranks are taken to have as many samples each.  Call it
    on every rank, or on rank 0 alone: it does not communicate.
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
    """Write scalars to Weights & Biases: as `TensorBoard`, with one entry a step.

    Parameters
    ----------
    run : wandb.Run or similar
        Its ``log(scalars, step=step)`` is called.  None will do on other ranks.
    model : torch.nn.Module, optional
        As for `TensorBoard`.
    every : int, default 50
        As for `TensorBoard`.

    Raises
    ------
    TypeError
        If rank 0 has no such run.
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
