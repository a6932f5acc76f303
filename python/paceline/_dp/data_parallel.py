"""DataParallel: torch's class in name and contract, with replicas of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel.data_parallel import DataParallel as TorchDP

from paceline import _environment, _native
from paceline._checkpoint import LoadsEither, Wrapped
from paceline._compat import torch_core, torch_graph, torch_modes
from paceline._dp import devices as devices_
from paceline._dp.engine import Engine
from paceline._dp.marker import has_mark, unmarked
from paceline._dp.replicate import alone_because, check_lazy, parts_of
from paceline._dp.threads import is_inside_replica
from paceline._recorder import Steps

_log = logging.getLogger("paceline")
_starting = threading.Lock()


class _Arguments(tuple[Any, ...]):
    """The positional arguments of each replica, and how many rows each has."""

    sizes: tuple[int, ...]


class _Outputs(list[Any]):
    """The output of each replica, and how many rows it had, if that is known."""

    sizes: tuple[int, ...] | None


class DataParallel(LoadsEither[Wrapped], TorchDP[Wrapped]):
    """Trains a module on parts of each batch: a drop-in for torch's class.

    A batch is split over replicas of the module, and their outputs are joined in order.
    The meaning is the plain module's on the whole batch: same outputs, same gradients,
    for any loss.  Exceptions are statistics that belong to a replica by nature:
    BatchNorm in training (replica 0's survive) and dropout's random numbers.

    Parameters
    ----------
    module : torch.nn.Module
        The model, with its parameters on the first device.
    device_ids : sequence of int, str or torch.device, optional
        A device for each replica: numbers of CUDA GPUs, or ``["cpu"] * n`` for ``n``
        replicas on the CPU.  By default, as in torch, all GPUs.  Without a usable GPU
        the module is called plainly, unless ``PACELINE_CPU_REPLICAS`` is set.
    output_device : int, str or torch.device, optional
        Where outputs are: by default on the first device; -1 is the CPU.
    dim : int, default 0
        The dimension of inputs and outputs that is the batch's.

    Attributes
    ----------
    module : torch.nn.Module
        The model; replica 0 is this very object.
    device_ids : list of int or list of torch.device
        One per replica: numbers of GPUs, or the CPU; empty if the module is called
        plainly.
    output_device : int or torch.device
        Where outputs are.
    src_device_obj : torch.device
        Where the module is.
    dim : int
        The batch's dimension.

    Raises
    ------
    TypeError
        If ``module`` is no module, ``device_ids`` no list or ``dim`` no integer.
    ValueError
        If devices are mixed, or a device or ``PACELINE_CPU_REPLICAS`` is out of range.
    NotImplementedError
        If ``device_ids`` names devices other than CUDA's, or the CPU while the module
        is on a GPU.

    Warns
    -----
    UserWarning
        If ``device_ids`` names GPUs and there is none; if ``module`` is a wrapper
        already.

    See Also
    --------
    replicate : marks an argument that every replica is to get whole.
    check : compares a wrapped model with the plain one.

    Examples
    --------
    >>> import torch
    >>> from paceline import DataParallel
    >>> model = DataParallel(torch.nn.Linear(4, 2), ["cpu", "cpu"])
    >>> model(torch.ones(6, 4)).shape
    torch.Size([6, 2])
    >>> model(torch.ones(6, 4)).sum().backward()
    >>> model.module.bias.grad
    tensor([6., 6.])
    >>> list(model.state_dict())
    ['module.weight', 'module.bias']

    Notes
    -----
    The contract is that of `torch's class
    <https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html>`_;
    there replicas are on accelerators only.  ``scatter``, ``replicate``,
    ``parallel_apply`` and ``gather`` may be overridden.

    A replica has copies of the model's parameters and buffers, which a forward brings
    up to date.  What replica 0 writes to parameters and buffers, or sets as attributes,
    in forward stays; what others do is gone with the next forward, while ``id(self)``
    is the same there.  Objects that attributes or arguments hold (lists, dicts, caches)
    are shared by all replicas.  Parameters of replicas but replica 0 are no leaves:
    they have no ``.grad``; use ``torch.autograd.grad`` in forward.  All this is as with
    torch's class.  What differs from it:

    - Parameters of replicas are parameters: ``next(self.parameters())`` works in a
      forward.  Complex ones stay complex.  Hooks that a replica registers are its own.
    - Inputs that disagree about the size of the batch are an error, and never cut to
      the shortest.  :func:`paceline.replicate` marks what is not to be split; a tensor
      that has one number once a replica (``n.expand(n_replicas)``) gives it to each.
    - Parts of a batch differ by one row at the most, and a batch of fewer rows than
      replicas uses fewer.
    - Outputs may hold dataclasses, numbers, strings and NumPy arrays.  Numbers, strings
      and other objects come as a list with one entry per replica.  As arguments those
      go whole to each replica.
    - Lists of numbers, strings or objects alone have one entry a row, and are joined
      end to end; other lists entry by entry, as in torch.
    - The caller's autocast, default device and context variables reach all replicas.
    - State dicts load with the prefix ``module.`` and without it.
    - A ``scatter`` of a subclass may return any iterables; more parts than replicas
      are an error.  ``torch.nn.parallel.scatter`` and ``gather`` are for GPUs alone.

    As with torch's class, what a forward computes over its rows (a mean loss, a
    contrastive one) is over a replica's rows: compute such on the outputs instead.

    Random numbers: replica 0 goes on with the caller's stream, as the plain module
    would, and each other replica draws by a seed that follows from its state.

    **On the CPU** replicas run one after another on the caller's thread, each with all
    of torch's threads: to develop, test and teach programs for several GPUs.  For speed
    on CPUs take ranks: :func:`paceline.launch` and
    :class:`paceline.DistributedDataParallel`.  If a replica writes to the module
    itself, which it can reach by a lambda over ``self``, that is an error.

    **On GPUs** replicas are threads.  Gradients are added up while backward runs, in
    the order of replicas, those of replica 0 last; in 16-bit types with one rounding,
    and one more for replica 0's if there are three replicas or more.  A parameter that
    no replica has used keeps its gradient.
    Replicas whose forward draws from a generator that they share run one after the
    other, so that runs can be repeated; each GPU has a generator of its own.  Hooks on
    saved tensors see what replica 0 saves: put a ``checkpoint`` with
    ``use_reentrant=False`` inside the module rather than round the wrapper.
    """

    __module__ = "paceline"

    _ways: frozenset[bool] = frozenset()  # of calls that a backward may repeat

    def __init__(
        self,
        module: Wrapped,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        torch.nn.Module.__init__(self)  # none of torch's own machinery
        torch_core.attach()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"module is {type(module).__name__}: give a torch.nn.Module"
            )
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim is {dim!r}: give an integer")
        torch_core.warn_of_wrapper(module, type(self))
        devices = devices_.read(device_ids, output_device)
        self.module = module
        self.device_ids: list[Any] = devices.ids
        self.dim = dim
        self.output_device: Any = devices.output
        self.src_device_obj = devices.source
        self._are_gpus = devices.are_gpus
        self._alone_because = devices.because
        self._engine: Engine | None = None
        self._steps: Steps | None = None  # what records them
        if not self._are_gpus:
            devices_.refuse_gpu(self.module, self._alone_because)
            return
        devices_.warn_of_imbalance(self.device_ids)
        if len(self.device_ids) == 1:  # as torch
            self.module.to(self.src_device_obj)

    # ---- a step -------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on parts of the batch, and join what it returns.

        Parameters
        ----------
        *inputs, **kwargs
            For the module's own ``forward``: tensors and arrays are split along
            ``dim``, also inside lists, tuples, dicts and dataclasses; 0-dim tensors,
            other objects and what :func:`paceline.replicate` marks go whole to each
            replica.

        Returns
        -------
        object
            As the module returns it, for the whole batch.  A tensor without dimensions
            (a loss) comes as a vector with one entry per replica, as in torch; a number
            or a string as a list with one entry per replica.

        Raises
        ------
        ValueError
            If inputs disagree about the size of the batch, or outputs cannot be joined.
        Exception
            What the module raises in a replica: of its own type, with the number of the
            replica and its traceback in the message.
        """
        is_alone = len(self.device_ids) < 2 and not self._are_gpus
        call = self._call_plainly if is_alone else self._call_in_replicas
        if torch_core.is_profiling():
            with torch.autograd.profiler.record_function("DataParallel.forward"):
                return call(inputs, kwargs)
        return call(inputs, kwargs)

    @torch_core.uncompiled
    def _call_in_replicas(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_inner() or torch_modes.is_tracing():
            return self._call_plainly(inputs, kwargs)
        engine, ids = self._engine_for(self.device_ids), self.device_ids
        because = alone_because(self.module)
        if because is not None:
            _log.debug("DataParallel uses one replica: %s", because)
            ids = ids[:1]
            if not self._are_gpus:
                return self._call_plainly(inputs, kwargs)
        with engine.lock, self._recorded_steps():
            args, named = self.scatter(inputs, kwargs, ids)
            sizes = _sizes_of(args)
            args, named = _checked(len(ids), args, named)
            if len(ids) == 1:
                (output,) = engine.apply(self.module, [self.module], args, named)
                return engine.bring(output, devices_.output_of(self.output_device))
            replicas = self.replicate(self.module, self.device_ids[: len(args)])
            try:
                outputs = _Outputs(self.parallel_apply(replicas, args, named))
            finally:
                del replicas
                engine.release()
            outputs.sizes = sizes
            return self.gather(outputs, self.output_device)

    def _is_inner(self) -> bool:
        """Tell whether a replica calls this, or a backward that repeats its call."""
        if "_is_replica" in self.__dict__:
            return True
        is_inner = is_inside_replica()
        if torch_graph.current_task() >= 0 and not is_inner:
            if len(self._ways) > 1:
                raise RuntimeError(
                    "a backward repeats a call of a DataParallel, by a checkpoint most "
                    "likely, and it was called both by itself and inside another "
                    "DataParallel: give each of the two a wrapper of its own"
                )
            return True in self._ways
        # A checkpoint has hooks on saved tensors, or turns gradients off.
        if not torch.is_grad_enabled() or torch_modes.has_saved_tensors_hooks():
            self._ways |= {is_inner}
        return is_inner

    def _engine_for(self, device_ids: Sequence[Any]) -> Engine:
        """Return what runs replicas on these devices; for others than its own, anew."""
        indices, wanted = _indices(self, self.device_ids), _indices(self, device_ids)
        with _starting:  # one engine, however many threads ask
            engine = self._engine
            if engine is None or engine.indices != indices:
                check_lazy(parts_of(self.module))
                engine = self._engine = Engine(indices, is_cpu=not self._are_gpus)
        if wanted == indices[: len(wanted)]:
            return engine
        return Engine(wanted, is_cpu=not self._are_gpus)

    def _recorded_steps(self) -> Steps:
        """Return what records a forward that runs inside it."""
        if self._steps is None:
            self._steps = Steps(self, len(self.device_ids))
        return self._steps

    def _call_plainly(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        has_own_scatter = (
            type(self).scatter is not DataParallel.scatter or "scatter" in self.__dict__
        )
        if has_own_scatter and len(self.device_ids) == 1:
            scattered = self.scatter(inputs, kwargs, self.device_ids)
            (inputs, *_), (kwargs, *_) = _checked(1, *scattered)
        elif any(map(has_mark, inputs)) or (
            kwargs and any(map(has_mark, kwargs.values()))
        ):
            inputs, kwargs = unmarked(inputs, kwargs)
        return self.module(*inputs, **kwargs)

    # ---- for subclasses to override -------------------------------------------------

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
            The arguments of each replica; both empty if there are none at all.
        """
        if not inputs and not kwargs:
            return (), ()
        scattered = _native.scatter(
            tuple(inputs), kwargs or {}, len(device_ids), self.dim
        )
        chunks = self._engine_for(device_ids).place(scattered)
        args = _Arguments(args for args, _ in chunks)
        args.sizes = scattered.sizes
        return args, tuple(named for _, named in chunks)

    def replicate(
        self, module: torch.nn.Module, device_ids: Sequence[Any]
    ) -> list[Any]:
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
            The module itself, and replicas with copies of its parameters and buffers.
        """
        if not device_ids:
            return []
        return self._engine_for(device_ids).replicas(module, len(device_ids))

    def parallel_apply(
        self, replicas: Sequence[torch.nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its arguments.

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
        engine = self._engine_for(self.device_ids)
        return engine.apply(self.module, replicas, inputs, named)

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
        where = self.output_device if output_device is None else output_device
        engine, sizes = self._engine_for(self.device_ids), _sizes_of(outputs)
        return engine.join(outputs, sizes, self.dim, devices_.output_of(where))

    # ---- state ----------------------------------------------------------------------

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse what ``.cuda()`` makes of the module, rather than run one replica."""
        applied = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not self._are_gpus:
            devices_.refuse_gpu(self.module, self._alone_because)
        return applied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None, "_steps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch_core.attach()  # this process may never have constructed one
        if "_are_gpus" in state:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
        else:
            self._adopt(state)

    def _adopt(self, state: dict[str, Any]) -> None:
        """Become what a pickle of torch's class says: see ``paceline.install``."""
        module = state["_modules"]["module"]
        is_by_default = _environment.cpu_replicas() is not None
        device_ids = state["device_ids"] or (None if is_by_default else [])
        output_device, dim = state.get("output_device"), state.get("dim", 0)
        try:
            DataParallel.__init__(self, module, device_ids, output_device, dim)
        except NotImplementedError:
            if type(self) is not DataParallel:
                raise
            self.__dict__.clear()
            self.__class__ = TorchDP  # type: ignore[assignment]
            self.__setstate__(state)
            return
        ours = ("device_ids", "dim", "output_device", "src_device_obj")
        kept = {name: state[name] for name in state if name not in ours}
        super().__setstate__(kept)  # type: ignore[no-untyped-call]


def _indices(self: DataParallel[Any], device_ids: Sequence[Any]) -> list[int]:
    """Return the numbers of GPUs; zeros for the CPU."""
    if not self._are_gpus:
        return [0] * len(device_ids)
    is_own = list(device_ids) == self.device_ids[: len(device_ids)]
    return list(device_ids) if is_own else devices_.read(device_ids, None).ids


Lists = tuple[Sequence[Any], Sequence[dict[str, Any]]]


def _sizes_of(lists: Any) -> tuple[int, ...] | None:
    return getattr(lists, "sizes", None)


def _checked(n_replicas: int, args: Any, kwargs: Any) -> Lists:
    """Return each replica's arguments from what ``scatter`` has returned."""
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
