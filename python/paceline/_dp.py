"""DataParallel: torch's class in name and contract, two engines underneath."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import GenericAlias, TracebackType
from typing import Any

import torch
from torch.nn.parallel.data_parallel import DataParallel as TorchDP

from paceline import _devices, _engines, _native, _parts, _torch
from paceline._checkpoint import LoadsEither
from paceline._copies import check_lazy, parts_of, replicas_of
from paceline._draws import Drawing
from paceline._engines import Engine, Outputs
from paceline._replicate import has_mark
from paceline._threads import ThreadEngine, is_inside
from paceline._travel import CannotTravelError, ThisCallError

_log = logging.getLogger("paceline")
_starting = threading.Lock()

_OVERRIDABLE = ("scatter", "replicate", "parallel_apply", "gather")
_OF_THREADS = frozenset(("replicate", "parallel_apply"))


class DataParallel(LoadsEither, TorchDP[Any]):
    """Trains a module on parts of each batch side by side: a drop-in for torch's class.

    A batch is split over replicas of the module, their outputs come back joined, in
    order.  The meaning is the plain module's on the whole batch: same outputs, same
    gradients, for any loss; except for statistics that are each replica's own by nature
    (BatchNorm in training, of which replica 0's survive; dropout).

    Parameters
    ----------
    module : torch.nn.Module
        The model, with its parameters on the CPU.
    device_ids : sequence of str or torch.device, optional
        A device for each replica: ``["cpu"] * n`` for ``n`` of them.  By default as
        many as the environment variable ``PACELINE_CPU_REPLICAS`` says, else one a NUMA
        node; one replica is a plain call of the module.  Where ``device_ids`` names
        GPUs and there are none, the module is called plainly, as by torch.
    output_device : str or torch.device, optional
        Where outputs are; the CPU.
    dim : int, default 0
        The dimension of inputs and outputs that is the batch's.
    engine : {"auto", "process", "thread"}, default "auto"
        What runs the replicas: processes of their own, or threads of this one.  By
        default processes where the model can travel to them.

    Attributes
    ----------
    module : torch.nn.Module
        The model; replica 0 is this very object.
    device_ids : list of torch.device
        One a replica; empty where the module is called plainly.
    output_device, src_device_obj : torch.device
        Where outputs, and the module, are.
    dim : int
        The batch's dimension.

    Raises
    ------
    TypeError
        If ``module`` is no module, ``device_ids`` no list or ``dim`` no integer.
    ValueError
        If devices are mixed, or ``engine`` or ``PACELINE_CPU_REPLICAS`` is out of
        range.
    NotImplementedError
        If the module, or ``device_ids``, is on GPUs: not in this version.

    See Also
    --------
    replicate : marks an argument that every replica is to get whole.
    check : compares a wrapped model with the plain one.

    Notes
    -----
    The contract is that of `torch's class
    <https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html>`_;
    there, replicas are on GPUs only.  ``scatter``, ``replicate``, ``parallel_apply``
    and ``gather`` may be overridden.  Where it differs:

    - Parameters of replicas are parameters: ``next(self.parameters())`` works in a
      forward.  Complex ones stay complex.
    - What replica 0 does to its attributes, their containers and its gradients
      (``zero_grad``) in forward stays; hooks that a replica registers are its own.
    - Inputs that disagree about the size of the batch are an error, and never cut to
      the shortest.  :func:`paceline.replicate` marks what is not to be split; a tensor
      of one row a replica, all rows alike, gives a row to each.
    - Parts of a batch differ by one row at the most, and a batch of fewer rows than
      replicas uses fewer.
    - Outputs may hold dataclasses, numbers, strings and NumPy arrays; other objects
      come as a list of the replicas'.  As arguments those go whole to each replica.
    - The caller's autocast, default device, context variables and hooks on saved
      tensors reach replicas that are threads; processes are told of autocast.
    - State dicts load with the prefix ``module.`` and without it.
    - A ``scatter`` of a subclass may return any iterables; more parts than replicas
      are an error.  ``torch.nn.parallel.scatter`` and ``gather`` are for GPUs alone.

    As with torch's class, what a forward computes over its rows (a mean loss, a
    contrastive one) is over a replica's rows: compute such on the outputs instead.

    Random numbers: replica 0 goes on with the caller's stream, as the plain module
    would, and each other replica draws by a seed that follows from its state.

    Worker processes share the parameters, and hear at each forward of attributes that
    were assigned anew, of ``train()``, ``eval()`` and replaced parts, of what changed
    inside lists, dicts, sets, deques and plain objects that attributes hold (eight
    levels deep, 4,096 of them), and in the globals, closures, functions and classes
    that the model's own code reads; where code has changed, graphs of earlier forwards
    cannot be run backward any more. They do not see changes inside libraries (but of
    methods of classes in the model, and functions of torch that its code calls),
    objects with ``__slots__`` alone, bytearrays and arrays above 1 MiB, what
    ``lru_cache`` keeps, nor changes of ``os.environ``, the working directory and
    warning filters. With them

    - hooks of parameters and of the wrapper see all rows, as ever; modules with hooks
      of their own get threads, or an error where ``engine="process"`` was given;
    - hooks of a parameter's node in the graph (``AccumulateGrad``) and on tensors that
      are saved see what belongs to replica 0;
    - a ``checkpoint`` round the wrapper with ``use_reentrant=False`` saves the memory
      of replica 0 alone: put it inside the module;
    - inside a mode that sees operations (``FlopCounterMode``), and under
      ``torch.jit.trace``, a call runs by threads, or is such an error;
    - warnings and prints of the others are printed, and never raised or recorded.

    Threads run the replicas' forwards side by side, and share globals and containers,
    as torch's replicas do; backward is torch's own, on all cores.  Where a forward
    draws random numbers, threads run one after the other, so that runs can be repeated:
    torch has one generator for all threads.

    Examples
    --------
    >>> import torch
    >>> from paceline import DataParallel
    >>> model = DataParallel(torch.nn.Linear(4, 2), ["cpu", "cpu"], engine="thread")
    >>> model(torch.ones(6, 4)).shape
    torch.Size([6, 2])
    >>> model(torch.ones(6, 4)).sum().backward()
    >>> model.module.bias.grad
    tensor([6., 6.])
    >>> list(model.state_dict())
    ['module.weight', 'module.bias']
    >>> model.close()
    """

    def __class_getitem__(cls, kind: Any) -> GenericAlias:
        """Return ``DataParallel[kind]``, as annotations have it: torch's is generic."""
        return GenericAlias(cls, kind)

    def __init__(  # the signature is torch's, and one more
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        engine: str = "auto",
    ) -> None:
        torch.nn.Module.__init__(self)  # none of torch's own machinery
        _torch.attach()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"module is {type(module).__name__}: give a torch.nn.Module"
            )
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim is {dim!r}: give an integer")
        if engine not in _engines.NAMES:
            raise ValueError(
                f"engine is {engine!r}: give one of {', '.join(_engines.NAMES)}"
            )
        devices, self._alone_because = _devices.read(device_ids, output_device)
        self.module = module
        self.device_ids: list[torch.device] = devices  # type: ignore[assignment]
        self.dim = dim
        self.output_device: torch.device = _devices.CPU  # type: ignore[assignment]
        self.src_device_obj = _devices.CPU
        _devices.refuse_gpu(module)
        self._asked = engine
        self._engine: Engine | None = None
        self._threads: ThreadEngine | None = None
        self._choice = _engines.choose(self, engine)
        if self._asked == "auto" and self._choice[0] == "thread":
            _log.info("DataParallel runs its replicas as threads: %s", self._choice[1])

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
            (a loss) comes as a vector with one entry a replica, as in torch.

        Raises
        ------
        ValueError
            If inputs disagree about the size of the batch, or outputs cannot be joined.
        Exception
            What the module raises in a replica: of its own type, with the number of the
            replica and its traceback in the message.
        """
        if _torch.is_profiling():
            with torch.autograd.profiler.record_function("DataParallel.forward"):
                return self._call_module(inputs, kwargs)
        return self._call_module(inputs, kwargs)

    def _call_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.device_ids) < 2:
            return self._call_plainly(inputs, kwargs)
        return self._call_in_replicas(inputs, kwargs)

    @_torch.uncompiled
    def _call_in_replicas(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_inside():
            return self._call_plainly(inputs, kwargs)
        overridden = self._overridden
        engine = self._engine_for(overridden)
        try:
            return self._run_and_gather(engine, overridden, inputs, kwargs)
        except CannotTravelError as error:  # found before anything has run
            engine = self._stay(error)
        return self._run_and_gather(engine, overridden, inputs, kwargs)

    def _run_and_gather(
        self,
        engine: Engine,
        overridden: frozenset[str],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with engine.lock:
            if "scatter" in overridden:
                scatter = self.scatter(inputs, kwargs, self.device_ids)
                args, named = _parts.arguments(self, *scatter)
                outputs = Outputs(engine.run_lists(self, args, named), None)
            else:
                n_replicas = len(self.device_ids)
                scattered = _native.scatter(inputs, kwargs, n_replicas, self.dim)
                outputs = Outputs(engine.run(self, scattered), scattered.sizes)
            if "gather" in overridden:
                return self.gather(outputs, self.output_device)
            return _parts.join(outputs, outputs.sizes, self.dim)

    def _call_plainly(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.device_ids) == 1 and "scatter" in self._overridden:
            scatter = self.scatter(inputs, kwargs, self.device_ids)
            (inputs, *_), (kwargs, *_) = _parts.arguments(self, *scatter)
        elif any(map(has_mark, inputs)) or (
            kwargs and any(map(has_mark, kwargs.values()))
        ):
            inputs, kwargs = _native.scatter(inputs, kwargs, 1, self.dim).chunk(0)
        return self.module(*inputs, **kwargs)

    def _engine_for(self, overridden: frozenset[str]) -> Engine:
        """Return the engine that runs the next forward."""
        own = overridden & _OF_THREADS
        if own and self.engine == "process":
            return self._stay(
                CannotTravelError(
                    f"{type(self).__name__} has a {min(own)}() of its own, which is "
                    "for replicas in this process"
                )
            )
        engine = self._engine or self._start_engine()
        if engine.n_replicas not in (0, len(self.device_ids)):  # changed since
            self.close()
            engine = self._start_engine()
        return engine

    def _start_engine(self) -> Engine:
        """Return the engine, made at the first forward that needs it."""
        with _starting:
            if self._engine is None:
                check_lazy(parts_of(self.module))
                if self._asked == "auto" or self._choice[0] == "none":
                    # The module, or the number of replicas, may have changed since.
                    self._choice = _engines.choose(self, self._asked)
                try:
                    self._engine = _engines.make(self._choice[0], self)
                except CannotTravelError as error:
                    return self._stay(error)
            return self._engine

    def _stay(self, error: CannotTravelError) -> Engine:
        """Take threads for a model that cannot travel, if the choice is ours.

        Graphs of earlier forwards keep the processes they need.
        """
        if self._asked != "auto":
            raise error
        if isinstance(error, ThisCallError):
            self._threads = self._threads or ThreadEngine()
            return self._threads
        self._choice = "thread", str(error)
        self._engine = ThreadEngine()
        _log.warning("DataParallel runs its replicas as threads: %s", error)
        return self._engine

    @property
    def _overridden(self) -> frozenset[str]:
        """Which of the methods made for it a subclass, or this object, overrides."""
        kind = type(self)
        if kind is DataParallel and self.__dict__.keys().isdisjoint(_OVERRIDABLE):
            return frozenset()
        return frozenset(
            name
            for name in _OVERRIDABLE
            if getattr(kind, name) is not getattr(DataParallel, name)
            or name in self.__dict__
        )

    # ---- what subclasses override ---------------------------------------------------

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
            The module itself, and shells round the same parameters.
        """
        return replicas_of(parts_of(module), len(device_ids)) if device_ids else []

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
        engine = self._engine
        if not isinstance(engine, ThreadEngine):
            engine = self._threads = self._threads or ThreadEngine()
        named = kwargs if kwargs is not None else [{}] * len(replicas)
        drawing = Drawing(parts_of(self.module))
        return engine.apply(drawing, replicas, inputs, named, self.device_ids)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs of replicas.

        Parameters
        ----------
        outputs : list
            One a replica, in order.
        output_device
            The CPU.

        Returns
        -------
        object
            The output for the whole batch.
        """
        return _parts.join(outputs, getattr(outputs, "sizes", None), self.dim)

    # ---- engine ---------------------------------------------------------------------

    @property
    def engine(self) -> str:
        """What runs replicas: ``"process"``, ``"thread"``; ``"none"`` for one."""
        return self._choice[0] if len(self.device_ids) > 1 else "none"

    @property
    def engine_reason(self) -> str:
        """Why it is this engine, as a sentence."""
        return self._choice[1] if len(self.device_ids) > 1 else self._alone_because

    def close(self) -> None:
        """Let go of threads and processes; may be called again.

        A later forward starts them anew.  They also end with the wrapper, and with the
        interpreter.
        """
        engines = (self._engine, self._threads)
        self._engine = self._threads = None
        for engine in engines:
            if engine is not None:
                engine.close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- state ----------------------------------------------------------------------

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse what ``.cuda()`` makes of the module, rather than run one replica."""
        applied = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        _devices.refuse_gpu(self.module)
        return applied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None, "_threads": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_asked" in state:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
        else:
            self._adopt(state)

    def _adopt(self, state: dict[str, Any]) -> None:
        """Become what a pickle of torch's class says: see ``paceline.install``."""
        module = state["_modules"]["module"]
        device_ids = state["device_ids"] or None
        try:
            DataParallel.__init__(self, module, device_ids, dim=state.get("dim", 0))
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
