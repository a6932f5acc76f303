"""What runs the replicas of a DataParallel, and how it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch.nn import Embedding, EmbeddingBag, Module

from paceline._compat import torch_modes
from paceline._compat.torch_core import is_lazy
from paceline._dp.process import obstacles
from paceline._dp.thread_engine import ThreadEngine
from paceline._replicas import thread_state
from paceline._replicas.errors import UnsupportedCallError, UnsupportedModelError

if TYPE_CHECKING:
    from paceline import _native
    from paceline._replicas.call import ReplicaCall

NAMES = ("auto", "process", "thread")


class Engine(Protocol):
    """What runs the replicas: `n_replicas` of them, or any number where that is 0.

    `lock` is held by who calls :meth:`run` or :meth:`run_lists`, until the outputs are
    gathered: they may lie in memory that the next forward overwrites.
    """

    name: str
    n_replicas: int

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def run(self, call: ReplicaCall, scattered: _native.Scattered) -> list[Any]:
        """Return the outputs of the replicas, in order."""

    def run_lists(
        self, call: ReplicaCall, inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of the replicas, each given its arguments."""

    def beside(self) -> AbstractContextManager[Any]:
        """Surround a call that another engine runs, for this once."""

    def close(self) -> None:
        """Let go of threads and processes."""


class Outputs(list[Any]):
    """The replicas' outputs, and how many rows each had: what gather goes by."""

    def __init__(self, outputs: Sequence[Any], sizes: tuple[int, ...] | None) -> None:
        super().__init__(outputs)
        self.sizes = sizes


def choose(
    asked: str, module: Module, override: str | None, are_gpus: bool
) -> tuple[str, str]:
    """Return the name of the engine for several replicas, and why, in a sentence.

    `override` is what a subclass overrides that is for replicas in this process.
    """
    alone_because = _alone_because(module)
    if alone_because is not None:
        return "none", alone_because
    if are_gpus:
        return "thread", "replicas on GPUs are threads of this process"
    if asked != "auto":
        return asked, f"engine={asked!r} was given"
    error = obstacle(module, override)
    if error is not None and not isinstance(error, UnsupportedCallError):
        return "thread", str(error)
    return "process", "the model can be sent to worker processes"


def _alone_because(module: Module) -> str | None:
    """Return what only a plain call of the module does as the module does, or None."""
    for name, part in module.named_modules():
        if isinstance(part, (Embedding, EmbeddingBag)) and part.max_norm is not None:
            return (
                f"one replica: '{name}' ({type(part).__name__}) has max_norm, by which "
                "each call writes the rows of the whole batch to the weight"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor) and tensor.is_inference():
            return f"one replica: '{name}' was made in torch.inference_mode()"
    return None


def obstacle(
    module: Module, override: str | None, is_first: bool = True
) -> UnsupportedModelError | None:
    """Return what speaks against worker processes now: for this call, or for good."""
    if override is not None:
        return UnsupportedCallError(
            f"{override}, which is for replicas in this process"
        )
    if torch_modes.binds_to_process():
        try:
            thread_state.default_device()
        except UnsupportedCallError as error:
            return error.with_traceback(None)
    return obstacles.obstacle(module, is_first)


def make(name: str, module: Module, n_replicas: int) -> Engine:
    """Return a new engine of that name."""
    if name == "process":
        from paceline._dp.process.engine import ProcessEngine

        return ProcessEngine(module, n_replicas)
    return ThreadEngine()
