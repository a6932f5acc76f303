"""Arguments and outputs of replicas, where a subclass or a caller has a say in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline import _native
from paceline._dp.effects import Forward
from paceline._dp.thread_engine import ThreadEngine
from paceline._recorder import Steps
from paceline._replicas import devices
from paceline._replicas.call import ReplicaCall
from paceline._replicas.replicate import parts_of

if TYPE_CHECKING:
    from paceline._dp.engines import Engine
    from paceline._dp.gpus.engine import GpuEngine

Lists = tuple[Sequence[Any], Sequence[dict[str, Any]]]

OVERRIDABLE = ("scatter", "replicate", "parallel_apply", "gather")


def arguments(n_replicas: int, args: Any, kwargs: Any) -> Lists:
    """Return each replica's arguments, as a ``scatter`` of somebody's own has them."""
    args = tuple(args)
    named = ({},) * len(args) if kwargs is None else tuple(kwargs)
    if not args and not named:
        return ((),), ({},)
    if len(args) != len(named):
        raise ValueError(
            f"scatter() gave {len(args)} replicas arguments, and {len(named)} "
            "keyword arguments: give both to each, be they () and {}"
        )
    if len(args) > n_replicas:
        raise ValueError(
            f"scatter() gave arguments for {len(args)} replicas, and there are "
            f"{n_replicas}"
        )
    return args, named


def join(outputs: Sequence[Any], sizes: tuple[int, ...] | None, dim: int) -> Any:
    """Return the output for the whole batch.

    `sizes` are the rows of each replica; None where somebody else split the arguments.
    """
    outputs = list(outputs)
    if len(outputs) == 1:
        return outputs[0]
    return _native.gather(outputs, sizes or (), dim)


class Overridable:
    """The methods of a wrapper that are there for subclasses to override."""

    module: torch.nn.Module
    dim: int
    device_ids: list[Any]
    _asked: str
    _are_gpus: bool
    _engine: Engine | None
    _threads: ThreadEngine | None
    output_device: Any

    if TYPE_CHECKING:

        def _gpu_engine(self, device_ids: Sequence[Any] | None = None) -> GpuEngine: ...

    @property
    def _overridden(self) -> frozenset[str]:
        """Which of these methods a subclass, or this object, overrides."""
        kind = type(self)
        return frozenset(
            name
            for name in OVERRIDABLE
            if getattr(kind, name) is not getattr(Overridable, name)
            or name in self.__dict__
        )

    @property
    def _override_for_threads(self) -> str | None:
        """What is overridden that is for replicas in this process, in words."""
        for name in ("replicate", "parallel_apply"):
            if name in self._overridden:
                return f"{type(self).__name__} has a {name}() of its own"
        return None

    def _replica_call(self, overridden: frozenset[str], steps: Steps) -> ReplicaCall:
        """Return what an engine has to know of this wrapper."""
        return ReplicaCall(
            self.module,
            self.device_ids,
            steps,
            self.replicate if "replicate" in overridden else None,
            self.parallel_apply if "parallel_apply" in overridden else None,
            keeps_outputs="gather" in overridden,
            raises_own_error=self._asked == "process",
        )

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[Any],
    ) -> Any:
        """Split arguments over replicas.

        Parameters
        ----------
        inputs : tuple
            Positional arguments.
        kwargs : dict or None
            Keyword arguments.
        device_ids : sequence
            One a replica, at most.

        Returns
        -------
        tuple of tuple, tuple of dict
            The arguments of each replica; both empty where there are none at all.
        """
        if not inputs and not kwargs:
            return (), ()
        scattered = _native.scatter(
            tuple(inputs), kwargs or {}, len(device_ids), self.dim
        )
        if self._are_gpus:
            chunks = self._gpu_engine(device_ids).place(scattered)
        else:
            chunks = [scattered.chunk(k) for k in range(len(scattered.sizes))]
        return tuple(args for args, _ in chunks), tuple(named for _, named in chunks)

    def replicate(
        self, module: torch.nn.Module, device_ids: Sequence[Any]
    ) -> list[torch.nn.Module]:
        """Make replicas of a module for one forward.

        Parameters
        ----------
        module : torch.nn.Module
            The module.
        device_ids : sequence
            One a replica.

        Returns
        -------
        list of torch.nn.Module
            The module itself, and shells round the same parameters; round copies of
            those that its forward writes, and of all before it has run once.
        """
        if not device_ids:
            return []
        if self._are_gpus:
            gpus = self._gpu_engine(device_ids)
            streams = gpus.group.streams()
            return gpus.replicas(parts_of(module), len(device_ids), streams)
        return Forward(parts_of(module)).replicas(len(device_ids))

    def parallel_apply(
        self, replicas: Sequence[torch.nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its arguments, as threads.

        Parameters
        ----------
        replicas : sequence of torch.nn.Module
            From :meth:`replicate`.
        inputs : sequence
            The positional arguments of each; what is no tuple or list is the only one.
        kwargs : sequence of dict or None
            The keyword arguments of each.

        Returns
        -------
        list
            What each returned.
        """
        named = kwargs if kwargs is not None else [{}] * len(replicas)
        if self._are_gpus:
            gpus = self._gpu_engine()
            arguments = parts_of(self.module), replicas, inputs, named
            return gpus.apply(*arguments, gpus.group.streams())
        engine = self._engine
        if not isinstance(engine, ThreadEngine):
            engine = self._threads = self._threads or ThreadEngine()
        forward = Forward(parts_of(self.module))
        return engine.apply(forward, replicas, inputs, named, self.device_ids)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs of replicas.

        Parameters
        ----------
        outputs : list
            One a replica, in order.
        output_device : int or torch.device
            Where the output is to be: the CPU, or the number of a GPU; -1 is the CPU.

        Returns
        -------
        object
            The output for the whole batch.
        """
        return self._join(outputs, getattr(outputs, "sizes", None), output_device)

    def _join(
        self, outputs: Any, sizes: tuple[int, ...] | None, output_device: Any = None
    ) -> Any:
        if not self._are_gpus:
            return join(outputs, sizes, self.dim)
        where = self.output_device if output_device is None else output_device
        output = devices.output_of(where)
        return self._gpu_engine().join(outputs, sizes, self.dim, output)
