"""DataParallel: torch's class in name and contract, two engines underneath."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import GenericAlias
from typing import Any

import torch
from torch.nn.parallel.data_parallel import DataParallel as TorchDP

from paceline import _environment, _native
from paceline._checkpoint import LoadsEither
from paceline._compat import torch_core, torch_graph
from paceline._dp import engines, overrides
from paceline._dp.engine_choice import ChoosesEngine
from paceline._dp.engines import Engine, Outputs
from paceline._dp.marker import has_mark
from paceline._dp.overrides import Overridable
from paceline._dp.thread_engine import ThreadEngine
from paceline._errors import last_line
from paceline._recorder import Steps
from paceline._replicas import devices as devices_
from paceline._replicas.call import ReplicaCall
from paceline._replicas.errors import (
    ReplicaFailedError,
    UnsupportedModelError,
)
from paceline._replicas.nesting import is_inside_replica

_log = logging.getLogger("paceline")


def _run_scattered(engine: Engine, call: ReplicaCall, arguments: Any) -> list[Any]:
    """Return the outputs of the replicas for what was scattered."""
    if isinstance(arguments, tuple):
        return engine.run_lists(call, *arguments)
    return engine.run(call, arguments)


class DataParallel(LoadsEither, Overridable, ChoosesEngine, TorchDP[Any]):
    """Trains a module on parts of each batch side by side: a drop-in for torch's class.

    A batch is split over replicas of the module, their outputs come back joined, in
    order.  The meaning is the plain module's on the whole batch: same outputs, same
    gradients, for any loss; except for statistics that are each replica's own by nature
    (BatchNorm in training, of which replica 0's survive; dropout).

    Parameters
    ----------
    module : torch.nn.Module
        The model, with its parameters on the first device.
    device_ids : sequence of int, str or torch.device, optional
        A device for each replica: numbers of CUDA GPUs, or ``["cpu"] * n`` for ``n``
        replicas on the CPU.  By default, as in torch, all GPUs; the environment
        variable ``PACELINE_CPU_REPLICAS`` asks for so many on the CPU instead.  Where
        there is no GPU that is one, a plain call of the module, also if ``device_ids``
        names GPUs.
    output_device : int, str or torch.device, optional
        Where outputs are: by default on the first device; -1 is the CPU.
    dim : int, default 0
        The dimension of inputs and outputs that is the batch's.
    engine : {"auto", "process", "thread"}, default "auto"
        What runs the replicas: processes of their own, or threads of this one.  By
        default processes where the model can be sent to them; threads on GPUs.

    Attributes
    ----------
    module : torch.nn.Module
        The model; replica 0 is this very object.
    device_ids : list of int or list of torch.device
        One a replica: numbers of GPUs, or the CPU; empty where the module is called
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
        If devices are mixed, or a device, ``engine`` or ``PACELINE_CPU_REPLICAS`` is
        out of range.
    NotImplementedError
        If ``device_ids`` names devices other than CUDA's, or the CPU while the module
        is on a GPU; if GPUs are to have processes of their own.

    See Also
    --------
    replicate : marks an argument that every replica is to get whole.
    check : compares a wrapped model with the plain one.

    Notes
    -----
    The contract is that of `torch's class
    <https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html>`_;
    there replicas are on accelerators only.  ``scatter``, ``replicate``,
    ``parallel_apply`` and ``gather`` may be overridden.  Where it differs:

    - Parameters of replicas are parameters: ``next(self.parameters())`` works in a
      forward.  Complex ones stay complex.
    - What replica 0 does to its attributes, their containers and its gradients
      (``zero_grad``) in forward stays; hooks that a replica registers are its own.
    - Inputs that disagree about the size of the batch are an error, and never cut to
      the shortest.  :func:`paceline.replicate` marks what is not to be split; a tensor
      that has one number once a replica (``n.expand(n_replicas)``) gives it to each.
    - Parts of a batch differ by one row at the most, and a batch of fewer rows than
      replicas uses fewer.
    - Outputs may hold dataclasses, numbers, strings and NumPy arrays; other objects
      come as a list of the replicas'.  As arguments those go whole to each replica.
    - Lists of numbers, strings or objects alone have one entry a row, and are joined
      end to end; other lists entry by entry, as in torch.
    - The caller's autocast, default device and context variables reach replicas that
      are threads, and so do hooks on saved tensors on the CPU; processes receive
      autocast.
    - State dicts load with the prefix ``module.`` and without it.
    - A ``scatter`` of a subclass may return any iterables; more parts than replicas
      are an error.  ``torch.nn.parallel.scatter`` and ``gather`` are for GPUs alone.

    As with torch's class, what a forward computes over its rows (a mean loss, a
    contrastive one) is over a replica's rows: compute such on the outputs instead.

    Random numbers: replica 0 goes on with the caller's stream, as the plain module
    would, and each other replica draws by a seed that follows from its state.

    Worker processes share the parameters, and receive at each forward what has changed
    in the model, in what its attributes hold, and in the code and the globals of the
    script.  They do not see what is changed inside imported modules (where it concerns
    functions and globals of your own that the model's classes mention, it is noticed;
    :meth:`refresh` has workers import all anew), nor ``os.environ``, the working
    directory, warning filters, NumPy's ``seterr``, contexts of ``decimal``,
    ``functools`` caches, and the ``.grad`` of parameters.  Strings have another hash in
    each process unless ``PYTHONHASHSEED`` is set before the program starts: sets of
    constants that the model or an argument holds keep their order, but not sets of
    strings that a forward or an imported module makes.  What is not understood runs
    by threads, as ``engine_reason`` says, or is an error with ``engine="process"``:
    random generators that the model holds, objects in which nobody can see changes, a
    forward that writes parameters or runs a backward that gives them gradients, a
    replica that fails in its process alone.  With processes

    - a forked process writes into its own copy of the parameters, and sees yours
      change on the pages that it has not written;
    - what a forward writes into an input in place is seen in the rows of replica 0
      alone;
    - hooks of parameters and of the wrapper see all rows, as ever; while modules have
      hooks of their own, calls run by threads;
    - hooks of a parameter's node in the graph (``AccumulateGrad``) and on tensors that
      are saved see what belongs to replica 0;
    - a ``checkpoint`` round the wrapper with ``use_reentrant=False`` saves the memory
      of replica 0 alone: put it inside the module;
    - inside a mode that sees operations (``FlopCounterMode``), and under
      ``torch.jit.trace``, a call runs by threads, or is such an error;
    - warnings and prints of the others are printed, and never raised or recorded; what
      they log reaches the caller's handlers, and their breakpoints are skipped.

    On GPUs replicas are threads, and their parameters and buffers copies that stay on
    their devices: a forward brings them up to date, as in torch.  Gradients are added
    up while backward runs, large ones by all devices but the first together, in the
    order of replicas, those of replica 0 last; in 16-bit types with one rounding, and
    one more for replica 0's where there are three replicas or more.  A parameter that
    no replica has used keeps its gradient.
    Hooks on saved tensors see what replica 0 saves, so that a ``checkpoint`` round the
    wrapper with ``use_reentrant=False`` saves memory on the first GPU alone: put it
    inside the module.

    Threads run the replicas' forwards side by side, and share globals and containers,
    as torch's replicas do; backward is torch's own, on all cores.  Where a forward
    draws random numbers from a generator that they share, threads run one after the
    other, so that runs can be repeated; each GPU has a generator of its own.
    Of parameters that it writes, replicas but replica 0 have copies, as in torch.

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

    __module__ = "paceline"

    _was_inner = False  # the last call, but for those of backwards

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
        torch_core.attach()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"module is {type(module).__name__}: give a torch.nn.Module"
            )
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim is {dim!r}: give an integer")
        if engine not in engines.NAMES:
            raise ValueError(
                f"engine is {engine!r}: give one of {', '.join(engines.NAMES)}"
            )
        devices = devices_.read(device_ids, output_device)
        self.module = module
        self.device_ids: list[Any] = devices.ids
        self.dim = dim
        self.output_device: Any = devices.output
        self.src_device_obj = devices.source
        self._are_gpus, self._alone_because = devices.are_gpus, devices.because
        self._place_module(engine)
        self._asked = engine
        self._engine: Engine | None = None
        self._threads: ThreadEngine | None = None
        self._choice = self._choose()
        self._reasons_logged: set[str] = set()
        if self._asked == "auto" and self.engine == "thread" and not self._are_gpus:
            self._log_reason(logging.INFO, self.engine_reason)
        elif len(self.device_ids) > 1 and self._choice[0] == "none":
            _log.info("DataParallel calls the module itself: %s", self._choice[1])

    def _place_module(self, engine: str) -> None:
        """See that the module can be where its replicas are."""
        if not self._are_gpus:
            devices_.refuse_gpu(self.module, self._alone_because)
            return
        if engine == "process":
            raise NotImplementedError(
                "engine is 'process', and device_ids names GPUs: replicas there are "
                "threads of this process; leave engine out"
            )
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
            (a loss) comes as a vector with one entry a replica, as in torch.

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
        if self._is_inner():
            return self._call_plainly(inputs, kwargs)
        chosen = self._engine_for_call()
        if chosen is None:
            return self._call_plainly(inputs, kwargs)
        engine: Engine = chosen
        if engine is not self._threads:
            try:
                return self._run_and_gather(engine, inputs, kwargs)
            except UnsupportedModelError as error:  # found before anything has run
                engine = self._use_threads(error)
        with self._engine.beside() if self._engine is not None else nullcontext():
            return self._run_and_gather(engine, inputs, kwargs)

    def _is_inner(self) -> bool:
        """Tell whether a replica calls this, or a backward that repeats its call."""
        is_inner = is_inside_replica()
        if torch_graph.current_task() >= 0:  # a checkpoint, most likely
            return is_inner or self._was_inner
        if is_inner is not self._was_inner:
            self._was_inner = is_inner
        return is_inner

    def _run_and_gather(
        self, engine: Engine, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        overridden, n_replicas = self._overridden, len(self.device_ids)
        if self._choice[0] == "none":  # on one GPU
            n_replicas = 1
        with engine.lock, self._recorded_steps() as steps:
            if "scatter" in overridden:
                scattered = self.scatter(inputs, kwargs, self.device_ids)
                arguments: Any = overrides.arguments(n_replicas, *scattered)
                sizes = None
            else:
                arguments = _native.scatter(inputs, kwargs, n_replicas, self.dim)
                sizes = arguments.sizes
            # scatter() may have set the module
            call = self._replica_call(overridden, steps)

            def join(outputs: list[Any]) -> Any:
                found = Outputs(outputs, sizes)
                if "gather" in overridden:
                    return self.gather(found, self.output_device)
                return self._join(found, sizes)

            if engine.name == "process":
                return self._run_or_leave(engine, call, arguments, join)
            return join(_run_scattered(engine, call, arguments))

    def _recorded_steps(self) -> Steps:
        """Return what records a forward that runs inside it."""
        if self._steps is None:
            self._steps = Steps(self, len(self.device_ids))
        return self._steps

    def _run_or_leave(
        self,
        engine: Any,
        call: ReplicaCall,
        arguments: Any,
        join: Callable[[list[Any]], Any],
    ) -> Any:
        """Run replicas in processes, or in this one where that is what fails.

        Where the choice is ours and a replica fails, or returns what cannot be joined,
        the call is made good here, without a second run of replica 0.  Where it fails
        here too, the error is the module's own.
        """
        try:
            try:
                return join(_run_scattered(engine, call, arguments))
            except ReplicaFailedError as failure:
                error: Exception = failure.error
                if self._asked != "auto":
                    raise error from None
            except (TypeError, ValueError) as failure:
                if self._asked != "auto" or not engine.has_run:
                    raise
                error = failure
            threads = ThreadEngine()
            outputs = engine.run_again()
            if outputs is None:
                outputs = _run_scattered(threads, call, arguments)
            joined = join(outputs)
        finally:
            engine.finish()
        self._choice = (
            "thread",
            "a replica fails in a process of its own, and not in this one "
            f"({last_line(error)})",
        )
        self._engine = threads
        self._log_reason(logging.WARNING, self._choice[1])
        return joined

    def _call_plainly(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_alone = bool(self.device_ids) and self.engine == "none"
        if is_alone and "scatter" in self._overridden:
            scatter = self.scatter(inputs, kwargs, self.device_ids[:1])
            (inputs, *_), (kwargs, *_) = overrides.arguments(1, *scatter)
        elif any(map(has_mark, inputs)) or (
            kwargs and any(map(has_mark, kwargs.values()))
        ):
            inputs, kwargs = _native.scatter(inputs, kwargs, 1, self.dim).chunk(0)
        return self.module(*inputs, **kwargs)

    # ---- state ----------------------------------------------------------------------

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse what ``.cuda()`` makes of the module, rather than run one replica."""
        applied = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not self._are_gpus:
            devices_.refuse_gpu(self.module, self._alone_because)
        return applied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None, "_threads": None, "_steps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch_core.attach()  # this process may never have constructed one
        if "_asked" in state:
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
