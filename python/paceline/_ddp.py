"""DistributedDataParallel: torch's class in name and contract, our core underneath."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import _native, _options, _torch
from paceline._join import Joining
from paceline._model import (
    Model,
    copy_model,
    has_nothing_to_train,
    is_stateless_call,
    raise_first_difference,
    watch,
)
from paceline._options import Options
from paceline._pass import Pass
from paceline._rendezvous import Meeting


class DistributedDataParallel(Joining):
    """Trains one model on all ranks of a process group: a drop-in for torch's class.

    Each rank runs the same script on its share of the data; gradients come out of
    ``backward()`` averaged over the ranks, and parameters stay equal.  Gradients travel
    through memory that the ranks of a host share, summed while backward still runs.

    Parameters
    ----------
    module : torch.nn.Module
        The model, with its parameters on the CPU.
    device_ids, output_device : optional
        For GPU modules: None here.
    dim : int, default 0
        Kept for compatibility.
    broadcast_buffers : bool, optional
        Whether rank 0's buffers (BatchNorm's statistics) reach every rank; default
        True.
    init_sync : bool, default True
        Whether rank 0's parameters and buffers are copied to all ranks at construction.
        (That the ranks' models agree is checked in any case.)
    process_group : torch.distributed.ProcessGroup, optional
        The ranks; the default group where none is given.  Its CPU backend must be Gloo,
        and its 1 to 64 ranks must run on one host.
    bucket_cap_mb : float, optional
        Mebibytes of gradients that are averaged at a time.  Default 1, which suits
        shared memory (torch's 25 suits networks).
    find_unused_parameters, gradient_as_bucket_view, static_graph : bool
        Accepted and not needed: unused parameters are found by themselves, large
        gradients are always views, and a graph may change from step to step.
    skip_all_reduce_unused_params, batched_grad_copy : bool
        Accepted and not needed, likewise.
    check_reduction : bool
        Deprecated in torch, without effect.
    device_mesh : torch.distributed.DeviceMesh, optional
        A whole 1-D mesh, in place of ``process_group``.
    forward_sync_buffers : bool, optional
        The newer name of ``broadcast_buffers``.
    delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision, \
bucket_cap_mb_list : optional
        Not supported yet.

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
        If an argument, a device or a process group is not supported yet.
    ValueError
        If there is no process group, or an argument is out of range.
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

    As in torch, ``max_norm`` of an embedding scales the rows that its own rank used.

    Examples
    --------
    A script for ``torchrun --nproc-per-node 2 train.py``::

        import torch
        import torch.distributed as dist
        from paceline import DistributedDataParallel

        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(10, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.randn(8, 10)).square().mean().backward()
            optimizer.step()
        dist.destroy_process_group()
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
    ) -> None:
        torch.nn.Module.__init__(self)  # none of torch's own machinery
        Joinable.__init__(self)
        _torch.attach()
        _options.warn_of_deprecated(check_reduction)
        group = _options.read_group(process_group, device_mesh)
        options, error = _options.read(
            group,
            bucket_cap_mb=bucket_cap_mb,
            sync_buffers=(broadcast_buffers, forward_sync_buffers),
            sync_at_start=init_sync,
            unsupported={
                "delay_all_reduce_named_params": delay_all_reduce_named_params,
                "param_to_hook_all_reduce": param_to_hook_all_reduce,
                "mixed_precision": mixed_precision,
                "bucket_cap_mb_list": bucket_cap_mb_list,
            },
        )
        self.module = module
        self.dim = dim
        self.device_ids = None
        self.output_device = None
        self.process_group = options.group
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_forward_param_sync = True
        self.bucket_bytes_cap = options.bucket_bytes
        self.use_side_stream_for_tensor_copies = False  # for the inherited to_kwargs()
        self.forward_sync_buffers = options.sync_buffers
        if not isinstance(getattr(TorchDDP, "broadcast_buffers", None), property):
            self.broadcast_buffers = options.sync_buffers  # torch before 2.13
        self._set_up(options, (device_ids, output_device), error)

    # ---- construction -------------------------------------------------------------

    def _set_up(
        self,
        options: Options,
        devices: tuple[Any, Any] = (None, None),
        error: Exception | None = None,
    ) -> None:
        """Compare the ranks' models, make the world, register the hooks."""
        meeting = Meeting(options.group)
        model = self._agree(meeting, options, devices, error)
        self._options = options
        self._reducer: _native.Reducer | None = None
        self._sync_without_peers = True
        self._is_copy = False
        self._is_alone = meeting.size == 1
        self.device = model.parameters[0][1].device
        self.device_type = self.device.type
        self.parameters_to_ignore = set(
            getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        )
        self.modules_buffers = [owner[name] for _, owner, name in model.buffers]
        self._module_parameters = [p for _, p in model.parameters]
        if self._is_alone:
            return  # the gradients of one rank are their own average
        buffers = model.buffers if options.sync_buffers else []
        owners = [(owner, name) for _, owner, name in buffers]
        caps = (options.bucket_bytes, options.last_bytes)
        arena_bytes, n_ops = _native.measure(
            model.trainable, owners, *caps, model.sparse
        )
        world = meeting.connect(max(arena_bytes, _options.MIB), n_ops)
        if options.sync_at_start:
            copy_model(world, model.tensors())
        self._world = world
        self._watch = watch(self)  # the module may be replaced as a whole
        self._reducer = _native.Reducer(
            world, model.trainable, owners, *caps, _options.VIEW_BYTES, model.sparse
        )
        self._reducer.set_join(*self._join_rules)

    def _agree(
        self,
        meeting: Meeting,
        options: Options,
        devices: tuple[Any, Any],
        error: Exception | None,
    ) -> Model:
        """Return the model, or raise on every rank what is wrong on any."""
        model = Model([], [])
        try:
            if not isinstance(self.module, torch.nn.Module):
                raise TypeError(
                    f"module is {type(self.module).__name__}: give a torch.nn.Module"
                )
            model = Model.of(self.module)
            self._check_devices(devices, model)
            model.check()
            model.check_supported(self.module)
        except (RuntimeError, TypeError, ValueError) as problem:
            error = error or problem
        digest = None if error is not None else model.digest()
        agreed = {
            "bucket_cap_mb": options.bucket_bytes,
            "broadcast_buffers": options.sync_buffers,
            "init_sync": options.sync_at_start,
        }
        told = meeting.exchange((digest, agreed, error))
        if error is not None:
            raise error
        for rank, (_, _, other) in enumerate(told):
            if other is not None:
                raise type(other)(f"rank {rank}: {other}")
        _options.raise_first_difference([row[1] for row in told])
        # The buckets must agree in any case, or gradients would be cross-wired.
        if len({row[0] for row in told}) > 1:
            raise_first_difference(meeting.exchange(model.describe()))
        return model

    @staticmethod
    def _check_devices(devices: tuple[Any, Any], model: Model) -> None:
        device_ids, output_device = devices
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError("device_ids can only be None or contain a single element.")
        if device_ids or output_device:
            found = sorted({str(p.device) for _, p in model.parameters})
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only "
                "work with single-device/multiple-device GPU modules or CPU modules, "
                f"but got device_ids {device_ids}, output_device {output_device}, and "
                f"module parameters {found}. Leave both out on the CPU."
            )

    # ---- a step -------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module.

        Parameters
        ----------
        *inputs, **kwargs
            For the module's own ``forward``.

        Returns
        -------
        object
            What the module returns, itself.

        Raises
        ------
        paceline.PeerError
            If a rank died or failed and the step cannot be taken.
        """
        if _torch.is_profiling():
            with torch.autograd.profiler.record_function(
                "DistributedDataParallel.forward"
            ):
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reducer = self._reducer
        if not torch.is_grad_enabled():
            if reducer is not None:
                reducer.apply_buffers()
            return self.module(*inputs, **kwargs)
        is_changed = reducer is not None and self._watch.changed()
        if (is_changed and has_nothing_to_train(self.module)) or (
            (is_changed or self._is_copy) and is_stateless_call(self.module)
        ):
            return self.module(*inputs, **kwargs)
        if self._join_config.enable and not self._is_alone:
            self._notify_join()
        if reducer is None:
            reducer = self._meet_as_copy()
        elif is_changed:
            reducer = self._adopt_changes()
        if reducer is None:
            return self.module(*inputs, **kwargs)
        reducer.forward_begins()
        one_pass = Pass(reducer)
        try:
            output = self.module(*inputs, **kwargs)
        except BaseException:
            self._world.note_exception(traceback.format_exc())
            raise
        reducer.forward_ends(one_pass.watch(output))
        return output

    def _meet_as_copy(self) -> _native.Reducer | None:
        """Have a copy (deepcopy, unpickled) that is to be trained meet its peers.

        Not before: a rank may make a copy alone, to save or to evaluate it.
        """
        if self._is_copy and not has_nothing_to_train(self.module):
            sync = self._sync_without_peers
            self._set_up(self._options)
            self.require_backward_grad_sync = sync
        elif not self._is_alone and not self._is_copy:
            raise RuntimeError(
                "wrapping the model anew after a change has failed: make a new "
                "DistributedDataParallel of wrapper.module on every rank"
            )
        return self._reducer

    def _adopt_changes(self) -> _native.Reducer:
        """Wrap the model anew, as it is now: every rank notices at this same forward.

        A rank that is alone in having changed its model leaves the others' world, and
        they raise ``PeerError`` where they wait for it.
        """
        assert self._reducer is not None
        self._check_all_are_active()
        self._reducer.apply_buffers()
        sync = self._reducer.sync
        # Outputs of earlier forwards may keep the reducer, and its world, alive.
        self._world.note_exception(
            "Its model was changed after wrapping. Change it on every rank, before the "
            "same forward."
        )
        self._reducer.detach()
        self._world.leave()
        self._reducer = None
        self._set_up(self._options)
        reducer: _native.Reducer | None = self._reducer
        assert reducer is not None
        reducer.sync = sync
        return reducer

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward averages gradients over the ranks."""
        if self._reducer is None:
            return bool(self._sync_without_peers)
        return self._reducer.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self._reducer is None:
            self._sync_without_peers = bool(value)
        else:
            self._reducer.sync = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank, without averaging.

        A backward is not averaged when its forward ran inside the context (torch's
        contract), or when it runs inside itself.  The first averaged backward after it
        averages all that has accumulated.

        Examples
        --------
        >>> with model.no_sync():  # doctest: +SKIP
        ...     loss(model(first)).backward()
        >>> loss(model(second)).backward()  # doctest: +SKIP
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

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
        if not _torch.is_default_group(self.process_group):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the "
                "default process group. That is, when you have called "
                "init_process_group and have not passed process_group argument to DDP "
                "constructor"
            )
        state = copy.copy(self.__dict__)
        options = state.pop("_options")
        for name in ("process_group", "_reducer", "_watch", "_world"):
            state.pop(name, None)
        state["_option_values"] = {
            name: getattr(options, name)
            for name in ("sync_buffers", "sync_at_start", "bucket_bytes", "last_bytes")
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        values = state.pop("_option_values")
        torch.nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self._options = Options(group=_torch.default_group(), **values)
        self.process_group = self._options.group
        self._reducer = None
        self._sync_without_peers = True
        self._is_copy = True
        self._forget_joins()

    # ---- small things --------------------------------------------------------------

    def _set_static_graph(self) -> None:
        self.static_graph = True  # nothing to do: see the class's docstring

    def will_sync_module_buffers(self) -> bool:
        """Tell whether a synchronised step sends rank 0's buffers."""
        return (
            self.require_forward_param_sync
            and bool(self._options.sync_buffers)
            and len(self.modules_buffers) > 0
        )
