"""DataParallel: torch's class in name and contract, with its own replicas."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel.data_parallel import DataParallel as TorchDP

from paceline._checkpoint import LoadsEither, Wrapped
from paceline._compat import mistakes, torch_core, torch_graph, torch_modes
from paceline._dp import devices as devices_
from paceline._dp.engine import Engine
from paceline._dp.marker import has_mark, unmarked
from paceline._dp.replicate import alone_because, check_lazy, is_replica, parts_of
from paceline._dp.threads import is_inside_replica
from paceline._recorder import Steps

_log = logging.getLogger("paceline")
_starting = threading.Lock()
_IS_INNER = "paceline_is_inner"  # what a checkpoint notes of the calls inside it


class _Arguments(tuple[Any, ...]):
    """The positional arguments and the number of rows of each replica."""

    sizes: tuple[int, ...]


class _Outputs(list[Any]):
    """The output of each replica, and its number of rows, if known."""

    sizes: tuple[int, ...] | None


class DataParallel(LoadsEither[Wrapped], TorchDP[Wrapped]):
    """Trains a module on parts of each batch: a drop-in for torch's class.

    A batch is split over replicas of the module, and their outputs are joined in order.
    For any loss, outputs and gradients equal those of the plain module on the whole
    batch, except with random numbers (dropout) or BatchNorm in training.  BatchNorm's
    statistics are per replica; the module keeps those of replica 0.

    Parameters
    ----------
    module : torch.nn.Module
        The model, with its parameters on the first device.
    device_ids : sequence of int, str or torch.device, optional
        A device for each replica: numbers of CUDA GPUs, or ``["cpu"] * n`` for ``n``
        replicas on the CPU.  By default, as in torch, all GPUs.  Without a usable GPU
        the module is called plainly, unless ``PACELINE_CPU_REPLICAS`` is set.
    output_device : int, str or torch.device, optional
        The device of outputs: by default the first; -1 is the CPU.
    dim : int, default 0
        The batch dimension of inputs and outputs.

    Attributes
    ----------
    module : torch.nn.Module
        The model; replica 0 is this very object.
    device_ids : list of int or list of torch.device
        One per replica: numbers of GPUs, or the CPU; empty if the module is called
        plainly.  Under ``PACELINE_CPU_REPLICAS`` these are the numbers that the GPUs
        would have.
    output_device : int or torch.device
        The device of outputs.
    src_device_obj : torch.device
        The device of the module.
    dim : int
        The batch dimension.

    Raises
    ------
    TypeError
        If ``module`` is not a module, ``device_ids`` not a list or ``dim`` not an
        integer.
    ValueError
        If devices are mixed, or a device or ``PACELINE_CPU_REPLICAS`` is out of range.
    NotImplementedError
        If ``device_ids`` names devices other than CUDA's, or the CPU while the module
        is on a GPU.

    Warns
    -----
    UserWarning
        If ``device_ids`` names GPUs and there are none; if ``module`` is already a
        wrapper.

    See Also
    --------
    replicate : marks an argument that every replica gets whole.
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
    torch's replicas are on accelerators only.  Subclasses may override ``scatter``,
    ``replicate``, ``parallel_apply`` and ``gather``.

    A replica has copies of the model's parameters and buffers, which each forward
    updates.  If replica 0 writes to parameters or buffers or sets attributes in
    forward, the module keeps the result.  The next forward discards writes by other
    replicas, although their ``id(self)`` stays the same.  All replicas share objects
    that attributes or arguments hold (lists, dicts, caches).  In replicas other than
    replica 0, parameters are not leaves and have no ``.grad``: in forward, use
    ``torch.autograd.grad``.  All this is as in torch's class.  The differences are:

    - Parameters of replicas are real parameters: ``next(self.parameters())`` works in a
      forward.  Complex ones stay complex.  Hooks that a replica registers are its own.
    - Inputs with different batch sizes are an error; they are never cut to the
      shortest.  :func:`paceline.replicate` marks arguments that must not be split.  A
      number expanded to one entry per replica (``n.expand(n_replicas)``) is allowed:
      each replica gets one entry.
    - Parts of a batch differ by at most one row.  A batch with fewer rows than replicas
      uses fewer replicas.
    - Outputs may hold dataclasses, numbers, strings and NumPy arrays.  Numbers, strings
      and other objects become a list with one entry per replica.  As arguments, they
      go whole to each replica.
    - An output that is a list of numbers, strings or objects must have one entry per
      row; such lists are joined end to end, others entry by entry, as in torch.
    - The caller's autocast, default device and context variables reach all replicas.
    - State dicts load with the prefix ``module.`` and without it.
    - A ``scatter`` of a subclass may return any iterables; more parts than replicas are
      an error.  ``torch.nn.parallel.scatter`` and ``gather`` are for GPUs only, unless
      :func:`paceline.install` replaces them.

    As in torch's class, a forward that computes over its rows (a mean or contrastive
    loss) sees its replica's rows only: compute such a loss on the outputs instead.

    Random numbers: from the process's generators replicas draw one after another, as if
    the module were called on each part.  Each GPU has its own generator.  Of those with
    one seed, as after ``torch.manual_seed``, a call gives all but the first new seeds,
    which are derived from it; they stay until the program seeds anew.

    **On the CPU** replicas run one after another on the caller's thread, each with all
    of torch's threads.  Use this to develop, test and teach programs for several GPUs;
    for speed on CPUs use ranks: :func:`paceline.launch` and
    :class:`paceline.DistributedDataParallel`.  It is an error if a replica writes to
    the module itself (by a lambda over ``self``).  Replicas that wait for one another
    run side by side, with a warning.

    **On GPUs** each replica has a thread.  Gradients are summed while backward runs, in
    the order of replicas; replica 0's come last.  In 16-bit types the sum is rounded
    once; with three or more replicas, it is rounded again when replica 0's are added.
    A parameter that no replica has used keeps its gradient.  If a forward draws from a
    generator that replicas share, replicas run one after another, so that runs can be
    repeated.  Hooks on saved tensors receive only the tensors that replica 0 saves: put
    a ``checkpoint`` with ``use_reentrant=False`` inside the module, not around the
    wrapper.
    """

    __module__ = "paceline"

    # For subclasses that skip the constructor:
    _alone_because = "a subclass has set device_ids"
    _engine: Engine | None = None
    _steps: Steps | None = None

    def __init__(
        self,
        module: Wrapped,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        mistakes.check_module(module)
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
        if not self._are_gpus:
            devices_.refuse_gpu(self.module, self._alone_because)
            return
        devices_.warn_of_imbalance(self.device_ids)
        if len(self.device_ids) == 1:  # as torch
            self.module.to(self.src_device_obj)

    @functools.cached_property
    def _are_gpus(self) -> bool:
        """Whether ``device_ids`` are GPUs; read if a subclass skips the constructor."""
        has_gpus = devices_.has_gpus()
        return has_gpus and devices_.read(self.device_ids, None).are_gpus

    # ---- a step -------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on parts of the batch, and join its outputs.

        Parameters
        ----------
        *inputs, **kwargs
            For the module's own ``forward``: tensors and arrays are split along
            ``dim``, also inside lists, tuples, dicts and dataclasses; 0-dim tensors,
            arguments marked by :func:`paceline.replicate`, empty containers,
            and other objects go whole to each replica.

        Returns
        -------
        object
            The module's output for the whole batch.  A tensor without dimensions (a
            loss) becomes a vector with one entry per replica, as in torch; a number or
            a string becomes a list with one entry per replica.

        Raises
        ------
        ValueError
            If inputs cannot be split by rows, or outputs cannot be joined.
        Exception
            The error that the module raises in a replica, of the same type; the message
            has the number of the replica and its traceback.
        """
        if torch_modes.is_exporting() and torch_modes.is_traced():
            return self.module(*inputs, **kwargs)
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
        if self._steps is None:
            self._steps = Steps(self, len(self.device_ids))
        return engine.run(
            functools.partial(self._run_replicas, engine, ids, inputs, kwargs)
        )

    def _run_replicas(
        self, engine: Engine, ids: list[Any], inputs: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a call in an engine that is reserved for it."""
        assert self._steps is not None
        with self._steps:  # which records the forward
            args, named = self.scatter(inputs, kwargs, ids)
            sizes = getattr(args, "sizes", None)
            args, named = _checked(len(ids), args, named)
            if len(ids) == 1:
                (output,) = engine.apply(self.module, [self.module], args, named)
                where = devices_.output_of(self.output_device, self._are_gpus)
                return engine.bring(output, where)
            replicas = self.replicate(self.module, self.device_ids[: len(args)])
            try:
                outputs = _Outputs(self.parallel_apply(replicas, args, named))
            finally:
                del replicas
                engine.release()
            outputs.sizes = sizes
            return self.gather(outputs, self.output_device)

    def _is_inner(self) -> bool:
        """Tell whether this call is inside a replica, or repeats such a call."""
        if is_replica(self):
            return True
        is_inner = is_inside_replica()
        # A checkpoint sets hooks on saved tensors, or turns gradients off.
        is_plain = torch.is_grad_enabled() and not torch_modes.has_saved_tensors_hooks()
        is_backward = torch_graph.current_task() >= 0
        if is_plain and not is_backward:
            return is_inner
        records = list(torch_graph.checkpoints())
        if is_backward and not is_inner:
            noted = (vars(record).get(_IS_INNER) for record in records)
            is_inner = next((known for known in noted if known is not None), False)
        for record in records:
            vars(record).setdefault(_IS_INNER, is_inner)
        return is_inner

    def _engine_for(self, device_ids: Sequence[Any]) -> Engine:
        """Return the wrapper's engine, or a new one if these are other devices."""
        own, engine, n = list(self.device_ids), self._engine, len(device_ids)
        if engine is None or engine.device_ids != own:
            with _starting:  # one engine, even if several threads need it
                engine = self._engine
                if engine is None or engine.device_ids != own:
                    check_lazy(parts_of(self.module))
                    engine = self._engine = Engine(own, is_cpu=not self._are_gpus)
        if list(device_ids) == own[:n]:
            return engine
        others = [0] * n if engine.is_cpu else devices_.read(device_ids, None).ids
        if others == engine.indices[:n]:
            return engine
        return Engine(others, is_cpu=engine.is_cpu)

    def _call_plainly(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        has_own_scatter = (
            type(self).scatter is not DataParallel.scatter or "scatter" in self.__dict__
        )
        if has_own_scatter and len(self.device_ids) == 1:
            scattered = self.scatter(inputs, kwargs, self.device_ids)
            (inputs, *_), (kwargs, *_) = _checked(1, *scattered)
        elif has_mark((inputs, kwargs)):
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
            At most one per replica.

        Returns
        -------
        tuple of tuple, tuple of dict
            The arguments of each replica; both are empty if there are no arguments.
        """
        if not inputs and not kwargs:
            return (), ()
        chunks, sizes = self._engine_for(device_ids).scatter(
            tuple(inputs), kwargs or {}, len(device_ids), self.dim
        )
        args = _Arguments(args for args, _ in chunks)
        args.sizes = sizes
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
            One per replica.

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
            The positional arguments of each; a single one need not be in a tuple.
        kwargs : sequence of dict or None
            The keyword arguments of each.

        Returns
        -------
        list
            The output of each.
        """
        named = kwargs if kwargs is not None else [{}] * len(replicas)
        engine = self._engine_for(self.device_ids)
        return engine.apply(self.module, replicas, inputs, named)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs of replicas.

        Parameters
        ----------
        outputs : list
            One per replica, in order.
        output_device : int or torch.device
            The device of the output: the CPU, or the number of a GPU; -1 is the CPU.

        Returns
        -------
        object
            The output for the whole batch.
        """
        where = self.output_device if output_device is None else output_device
        where = devices_.output_of(where, self._are_gpus)
        sizes = getattr(outputs, "sizes", None)
        return self._engine_for(self.device_ids).join(outputs, sizes, self.dim, where)

    # ---- state ----------------------------------------------------------------------

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Raise if ``.cuda()`` moves the module while replicas are on the CPU."""
        applied = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not self.__dict__.get("_are_gpus", True):
            devices_.refuse_gpu(self.module, self._alone_because)
        return applied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None, "_steps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch_core.attach()  # this process may not have constructed one yet
        if "_engine" in state:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
        else:
            self._adopt(state)

    def _adopt(self, state: dict[str, Any]) -> None:
        """Take the state from a pickle of torch's class: see ``paceline.install``."""
        module = state["_modules"]["module"]
        device_ids = state["device_ids"]
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


def _checked(
    n_replicas: int, args: Any, kwargs: Any
) -> tuple[Sequence[Any], Sequence[dict[str, Any]]]:
    """Return each replica's arguments from the result of ``scatter``."""
    args = tuple(args)
    named = ({},) * len(args) if kwargs is None else tuple(kwargs)
    if not args and not named:
        return ((),), ({},)
    if len(args) != len(named):
        raise ValueError(
            f"scatter() returned arguments for {len(args)} replicas, and keyword "
            f"arguments for {len(named)}: return both for each, even if they are "
            "() and {}"
        )
    if len(args) > n_replicas:
        raise ValueError(
            f"scatter() returned arguments for {len(args)} replicas, but there are "
            f"{n_replicas}"
        )
    return args, named
