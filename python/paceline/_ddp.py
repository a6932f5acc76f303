"""DistributedDataParallel: torch's class in name and contract, our core underneath."""

from __future__ import annotations

import copy
import dataclasses
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from paceline import _cuda, _environment, _native, _options, _torch, _torch_groups
from paceline._comm_hooks import CommHooks, pack_hooks, unpack_hooks
from paceline._forward import Forward
from paceline._model import Model, copy_model, raise_first_difference, watch
from paceline._options import Options
from paceline._rendezvous import Meeting

_NOT_COPIED = (
    "device_mesh",
    "process_group",
    "_finish",
    "_demand",
    "_journal",
    "_model",
    "_passes",
    "_reducer",
    "_steady",
    "_trainable",
    "_watch",
    "_world",
)


class DistributedDataParallel(Forward, CommHooks):
    """Trains one model on all ranks of a process group: a drop-in for torch's class.

    Each rank runs the same script on its share of the data; gradients come out of
    ``backward()`` averaged over the ranks, and parameters stay equal.  Gradients travel
    while backward still runs: on the CPU through memory that the ranks of a host share,
    on GPUs by NCCL.

    Parameters
    ----------
    module : torch.nn.Module
        The model, with its parameters on the CPU, or all on one GPU (CUDA).
    device_ids : list of one int, str or torch.device, optional
        The GPU that the module is on: inputs are then moved there.  None: they are left
        as they are.  None or empty on the CPU.
    output_device : int, str or torch.device, optional
        Kept for compatibility: outputs stay where the module makes them.
    dim : int, default 0
        Kept for compatibility.
    broadcast_buffers : bool, optional
        Whether rank 0's buffers (BatchNorm's statistics) reach every rank; default
        True.
    init_sync : bool, default True
        Whether rank 0's parameters and buffers are copied to all ranks at construction.
        (That the ranks' models agree is checked in any case.)
    process_group : torch.distributed.ProcessGroup, optional
        The ranks, 1 to 64; the default group where none is given.  Over Gloo or NCCL,
        ranks of one host meet in shared memory.  Modules on the CPU whose ranks are on
        several hosts, or in a group of any other kind (MPI, a subclass in Python), are
        averaged by the group's own collectives, where it takes CPU tensors.  Of modules
        on GPUs a group over Gloo carries no gradient: NCCL does.
    bucket_cap_mb : float, optional
        Mebibytes of gradients that are averaged at a time.  Default 1, which suits
        shared memory; torch's 25 where NCCL, a communication hook or the group's
        collectives carry them.  On GPUs the bucket that fills last, which nothing
        hides, has 1 at the most.
    find_unused_parameters, gradient_as_bucket_view, static_graph : bool
        Accepted and not needed: unused parameters are found by themselves, large
        gradients are always views, and a graph may change from step to step (unless
        ``strict``).
    skip_all_reduce_unused_params, batched_grad_copy : bool
        Accepted and not needed, likewise.
    check_reduction : bool
        Deprecated in torch, without effect.
    device_mesh : torch.distributed.DeviceMesh, optional
        A whole 1-D mesh, in place of ``process_group``.
    bucket_cap_mb_list : list of float, optional
        Mebibytes of each bucket, in the order in which they fill.
    forward_sync_buffers : bool, optional
        The newer name of ``broadcast_buffers``: False leaves the copy of rank 0's
        buffers at construction, as in torch.
    delay_all_reduce_named_params, param_to_hook_all_reduce : optional
        Accepted, both or neither, and not needed: gradients of the named parameters
        are averaged with all others.
    mixed_precision : optional
        Not supported yet.
    strict : bool, optional
        Whether to refuse, in torch's words, what torch refuses and this class serves:
        parameters left out without ``find_unused_parameters``, a second gradient of a
        parameter in one backward, a graph that changes under ``static_graph``,
        bfloat16 hooks on the CPU.  Default: whether ``PACELINE_STRICT`` is 1.
    accumulate_in_fp32 : bool, default False
        On GPUs, whether float16 and bfloat16 gradients are added up in float32, in the
        order of the ranks, and rounded once; otherwise as NCCL does.  On the CPU they
        always are.

    Attributes
    ----------
    module : torch.nn.Module
        The model.
    require_backward_grad_sync : bool
        Whether backward averages gradients; :meth:`no_sync` sets it.

    Raises
    ------
    RuntimeError
        On every rank, if no parameter of some rank's model requires a gradient, or a
        lazy one has no shape yet.
    paceline.MismatchError
        On every rank, if the models differ: the first difference is named.
    NotImplementedError
        On every rank, if an argument or a device is not supported yet, if parameters
        are on several GPUs, or if the driver or NCCL is missing or too old.
    TypeError
        On every rank, if an argument is of another type.
    ValueError
        If there is no process group.  On every rank, if an argument is out of range,
        ``device_ids`` is not where the module is, or two ranks share a GPU.
    paceline.PeerError
        If another rank dies during construction; later also from ``backward()``.

    Notes
    -----
    The contract is that of `torch's class
    <https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html>`_.
    Where it differs:

    - Parameters may be frozen and unfrozen at any time.  They may be converted,
      replaced or added after wrapping, and those that were frozen then be trained: the
      next forward notices, on every rank, and wraps the model anew.
    - A copy (``copy.deepcopy``, ``pickle``) meets its peers at its first forward that
      records gradients, or in a join: one rank may make and evaluate a copy alone.
    - A parameter that no rank used in a step keeps its ``.grad``, whatever the flags.
    - A sparse embedding may be left out by ranks, and get a dense gradient on some: the
      average is then dense on all. Any parameter's gradient may be sparse.
    - Evaluation (``torch.no_grad``) never communicates.
    - Rank 0's buffers are sent with each synchronised backward, and taken over by the
      other ranks at its end (or, where more forwards await their backward, later).
    - ``no_sync()`` also works around ``backward()`` alone.
    - In a backward a large parameter's ``.grad`` is None from the arrival of its
      gradient until the average is there, unless hooks of yours are on it.
    - A rank that dies, leaves or fails makes the others raise ``PeerError``, naming it.
    - Sums are taken in rank order, so each run gives the same bits.
    - Where the group's own collectives carry gradients, sums are in the group's order,
      and a rank that dies is noticed by the group, if by anybody: as in torch. After
      a step that failed there, the model must be wrapped anew on every rank.

    As in torch, ``max_norm`` of an embedding scales the rows that its own rank used.

    On GPUs:

    - A GradScaler, autocast and SyncBatchNorm are used as with torch's class.
    - A whole step can be captured into a CUDA graph once 3 steps were taken, which
      learn what is captured: it is replayed with the same parameters used, and nobody
      watches the other ranks in a replay.
    - No step waits for the GPU.  What NCCL, or a rank that is gone, does to a step is
      raised from that ``backward()`` or from the next one.
    - Ctrl-C in a backward that waits for another rank is heeded once that one has come
      or the group's timeout is over: torch waits for a thread of its own meanwhile.
    - Gradients of parameters that are declared sparse travel as dense ones.
    - Rank 0's buffers are taken over at the next forward or ``state_dict()``.

    Examples
    --------
    In a world of one rank; ``dist.init_process_group("gloo")`` in a script for
    ``torchrun`` makes it one of all ranks:

    >>> import torch, torch.distributed as dist
    >>> from paceline import DistributedDataParallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = DistributedDataParallel(torch.nn.Linear(10, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(8, 10)).square().mean().backward()
    ...     optimizer.step()  # by the mean of the ranks' gradients
    >>> list(model.state_dict())
    ['module.weight', 'module.bias']
    >>> dist.destroy_process_group()
    """

    def __init__(  # the signature is torch's
        self,
        module: torch.nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        strict: bool | None = None,
        accumulate_in_fp32: bool = False,
    ) -> None:
        torch.nn.Module.__init__(self)  # none of torch's own machinery
        Joinable.__init__(self)
        _torch.attach()
        _options.warn_of_deprecated(
            check_reduction, broadcast_buffers, forward_sync_buffers
        )
        _options.check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        group = _options.read_group(process_group, device_mesh)
        options, error = _options.read(
            group,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            sync_buffers=(broadcast_buffers, forward_sync_buffers),
            sync_at_start=init_sync,
            unsupported={"mixed_precision": mixed_precision},
            strict=strict,
            accumulate_in_fp32=accumulate_in_fp32,
        )
        self._options = options
        self._reducer: _native.Reducer | None = None
        self._comm_hooks = []
        self._open_books()
        self.module = module
        self.dim = dim
        self.device_ids = None
        self.output_device = None
        self.is_multi_device_module = False
        self.process_group = options.group
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = False
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = None
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = 250 * _options.MIB  # where torch's code asks
        self.bucket_bytes_cap = options.network_caps.bucket_bytes
        self.bucket_bytes_cap_list = list(options.network_caps.each)
        self.bucket_bytes_cap_default = not (bucket_cap_mb or bucket_cap_mb_list)
        # For the inherited to_kwargs().
        self.use_side_stream_for_tensor_copies = _environment.copies_by_side_stream()
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._delayed = (delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._set_up(options, (device_ids, output_device), error)
        del self._delayed
        if static_graph:
            self._set_static_graph()

    _moves_inputs = False  # to the GPU: whether device_ids were given

    # ---- construction -------------------------------------------------------------

    def _set_up(
        self,
        options: Options,
        devices: tuple[Any, Any] | None = None,
        error: Exception | None = None,
    ) -> None:
        """Compare the ranks' models, make the world, register the hooks."""
        meeting = Meeting(options.group, _cuda.type_of(self.module))
        model, gpu = self._agree(meeting, options, devices, error)
        self._model = model
        self._options = options
        self._reducer = None
        self._sync_without_peers = True
        self._is_copy = self._is_moved = False
        self._is_alone = meeting.size == 1
        self.device = model.parameters[0][1].device
        self.device_type = self.device.type
        delayed = {id(p) for p in self._delay_all_reduce_params}
        self.parameters_to_ignore = set(
            getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        ) | {name for name, p in model.parameters if id(p) in delayed}
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        self._trainable = model.trainable
        self._module_parameters = [
            p for _, p in model.parameters if id(p) not in delayed
        ]
        is_carried_by_group = meeting.is_relayed and gpu is None
        if self._is_alone and not is_carried_by_group and not self._needs_reducer:
            return  # the gradients of one rank are their own average
        buffers = model.buffers if self._sends_buffers else []
        owners = [(owner, name) for _, owner, name in buffers]
        caps = options.network_caps if is_carried_by_group else options.caps
        if gpu is not None:
            caps = options.device_caps
        bytes_of = (caps.bucket_bytes, caps.last_bytes)
        arena_bytes, n_ops, words_bytes = _native.measure(
            model.trainable,
            owners,
            *bytes_of,
            model.sparse,
            gpu.native if gpu is not None else None,
        )
        arena_bytes = max(arena_bytes, _options.MIB)
        if gpu is None:
            world = meeting.connect(arena_bytes, n_ops)
        else:
            device = gpu.memory(arena_bytes, words_bytes, options.accumulate_in_fp32)
            world = meeting.connect(words_bytes, n_ops, **device)
        try:
            if options.sync_at_start:
                copy_model(world, model.tensors(options.sync_buffers_at_start))
            reducer = _native.Reducer(
                world,
                model.trainable,
                owners,
                *bytes_of,
                _options.VIEW_BYTES,
                model.sparse,
                caps.each,
            )
        except BaseException:
            world.note_exception(traceback.format_exc())
            world.leave()
            raise
        self._world = world
        self._watch = watch(self)  # the module may be replaced as a whole
        self._reducer = reducer
        self._reducer.set_join(*self._join_rules)
        self._attach_books(self._reducer)
        self._attach_comm_hooks(model)

    def _agree(
        self,
        meeting: Meeting,
        options: Options,
        devices: tuple[Any, Any] | None,
        error: Exception | None,
    ) -> tuple[Model, _cuda.Gpu | None]:
        """Return model and GPU, or raise on every rank what is wrong on any."""
        model, gpu, seat = Model([], []), None, _cuda.Seat()
        try:
            if not isinstance(self.module, torch.nn.Module):
                raise TypeError(
                    f"module is {type(self.module).__name__}: give a torch.nn.Module"
                )
            model = Model.of(self.module)
            places = [p.device for _, p in model.parameters]
            if devices is not None:
                self.device_ids, self.output_device = _cuda.read_devices(
                    *devices, places
                )
                self._moves_inputs = bool(self.device_ids)
            model.check()
            model.check_supported(self.module)
            if "_delayed" in self.__dict__:  # at construction
                self._delay(*self._delayed, model)
            if devices is None:
                self._follow_module(places[0])
            if _cuda.is_gpu(places[0]):
                gpu, seat = _cuda.open_gpu(places[0], is_alone=meeting.size == 1)
        except (RuntimeError, TypeError, ValueError, MemoryError, OSError) as problem:
            error = error or problem
        digest = None if error is not None else model.digest()
        agreed = {
            "bucket_cap_mb": (options.caps, options.network_caps),
            "broadcast_buffers": options.sync_buffers,
            "init_sync": options.sync_at_start,
            "a hook for buffers": self._sends_buffers,
            "strict": options.strict,
            "accumulate_in_fp32": options.accumulate_in_fp32,
        }
        told = meeting.exchange((digest, agreed, error, seat))
        if error is not None:
            raise error
        for rank, (_, _, other, _) in enumerate(told):
            if other is not None:
                raise type(other)(f"rank {rank}: {other}")
        _cuda.raise_conflict([row[3] for row in told])
        _options.raise_first_difference([row[1] for row in told])
        # The buckets must agree in any case, or gradients would be cross-wired.
        if len({row[0] for row in told}) > 1:
            raise_first_difference(meeting.exchange(model.describe()))
        return model, gpu

    def _follow_module(self, device: torch.device) -> None:
        """Have inputs moved to where the module is now, if they were to be moved."""
        index = _cuda.machine.index_of(device)
        is_moved_to = index if self._moves_inputs else None
        self.device_ids = None if is_moved_to is None else [is_moved_to]
        self.output_device = is_moved_to

    # ---- state --------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, its keys prefixed by ``module.``."""
        if self._reducer is not None:
            self._reducer.apply_buffers()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict whose keys have the prefix ``module.``, or have it not."""
        if self._reducer is not None:
            self._reducer.apply_buffers()  # before they are overwritten, not after
        return super().load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Set training mode, as ``torch.nn.Module`` does."""
        torch.nn.Module.train(self, mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        if not _torch_groups.is_default_group(self.process_group):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the "
                "default process group. That is, when you have called "
                "init_process_group and have not passed process_group argument to DDP "
                "constructor"
            )
        state = copy.copy(self.__dict__)
        options = state.pop("_options")
        state["_comm_hooks"] = pack_hooks(self._comm_hooks)
        for name in _NOT_COPIED:
            state.pop(name, None)
        state["_option_values"] = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(Options)
            if field.name != "group"
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_option_values" not in state:  # of torch's class: see `paceline.install`
            self.__class__ = TorchDDP  # type: ignore[assignment]
            self.__setstate__(state)
            return
        state = dict(state)
        values = state.pop("_option_values")
        state["_comm_hooks"] = unpack_hooks(state["_comm_hooks"])
        torch.nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self._options = Options(group=_torch_groups.default_group(), **values)
        self.process_group = self._options.group
        self._reducer = None
        self._sync_without_peers = True
        self._is_copy = True
        self._model = Model.of(self.module)
        self._trainable = self._model.trainable
        for _, parameter in self._model.parameters[:1]:
            self._follow_module(parameter.device)  # torch.load() may have moved it
        self._open_books()
        self._forget_joins()
