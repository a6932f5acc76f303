"""The attributes of torch's wrapper besides its constructor and ``join``.

Methods of torch's class that only call ``self.reducer`` or ``self.logger`` are
inherited unchanged, and reach the objects of :mod:`paceline._ddp.torch_reducer`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from paceline import _gpu
from paceline._compat import torch_core, torch_modes
from paceline._ddp import (
    comm_hooks,
    forward,
    mixed_precision,
    placement,
    strict,
    torch_reducer,
)
from paceline._ddp.model_spec import Model
from paceline._ddp.session import Session


class TorchSurface(TorchDDP):
    """A wrapper's methods, and torch's private names that programs use."""

    module: Any
    _session: Session
    _moves_inputs = False  # to the GPU, if device_ids were given
    _ddp_sink_clone = True  # outputs are the module's own, never cloned
    _use_python_reducer = False
    _has_rebuilt_buckets = False
    _delay_grad_buffer = None  # delayed gradients are averaged with all others

    # ---- a forward ------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module.

        Parameters
        ----------
        *inputs, **kwargs
            Arguments of the module's ``forward``.

        Returns
        -------
        object
            The module's own return value.

        Raises
        ------
        paceline.PeerError
            If a rank died or failed, so that the step cannot be taken.
        RuntimeError
            Under ``strict``, in torch's words: if the last step left parameters out.
        """
        # The exported program runs without other ranks.
        if torch_modes.is_exporting() and torch_modes.is_traced():
            return self.module(*inputs, **kwargs)
        if torch_core.is_profiling():
            with torch.autograd.profiler.record_function(
                "DistributedDataParallel.forward"
            ):
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        if (
            torch_core.is_compile_used()
            or self._has_own_parts()
            or session.options.precision is not None
        ):
            return self._forward_in_parts(inputs, kwargs)
        forward_pass = forward.begin(self, session)
        try:
            if self.device_ids:
                inputs, kwargs = self._move_to_device(inputs, kwargs)
            # self.module, without torch's lookup
            output = self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]
            forward.end(self, session, output, forward_pass)
        except BaseException:
            if forward_pass is not None:
                forward_pass.forward_fails(self.training)
            raise
        return output

    def _has_own_parts(self) -> bool:
        """Tell whether a subclass or this object overrides a part of the forward."""
        kind, own = type(self), self.__dict__
        return (
            kind._run_ddp_forward is not _RUN
            or kind._pre_forward is not _BEFORE
            or kind._post_forward is not _AFTER
            or "_run_ddp_forward" in own
            or "_pre_forward" in own
            or "_post_forward" in own
        )

    def _forward_in_parts(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the parts by the names and in the order of torch's class."""
        opened = self._session.open_forwards.items
        n_opened = len(opened)
        try:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            if len(opened) == n_opened:  # a subclass has not called ours
                opened.append(forward.begin_uncompiled(self, self._session, False))
            output = self._run_ddp_forward(*inputs, **kwargs)
            return self._post_forward(output)
        except BaseException:
            for forward_pass in opened[n_opened:]:
                if forward_pass is not None:
                    forward_pass.forward_fails(self.training)
            raise
        finally:
            del opened[n_opened:]

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; torch.compile splits this one at its buckets."""
        before = torch_core.exchange_active_ddp(self)
        precision = self._session.options.precision
        try:
            if precision is not None and precision.param_dtype is not None:
                dtype = precision.param_dtype
                return mixed_precision.run(self.module, dtype, inputs, kwargs)
            return self.module(*inputs, **kwargs)
        finally:
            torch_core.exchange_active_ddp(before)

    def _pre_forward(
        self, *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Do the work before the module's forward; return its arguments.

        Callers that run the module themselves, such as ``replicate()``, call this
        before it, and :meth:`_post_forward` after it, in the same thread.
        """
        session = self._session
        session.open_forwards.items.append(forward.begin_uncompiled(self, session))
        if self.device_ids:
            inputs, kwargs = _move_uncompiled(self, inputs, kwargs)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        """Do the work after the module's forward; return its output unchanged."""
        session = self._session
        forward_pass = session.open_forwards.items.pop()
        forward.end_uncompiled(self, session, output, forward_pass)
        return output

    def _move_to_device(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs on the GPU of ``device_ids``, as torch moves them."""
        if not kwargs and all(
            type(value) is torch.Tensor and value.device == self.device
            for value in inputs
        ):
            return inputs, kwargs
        assert self.device_ids is not None
        to: Any = self.to_kwargs  # has no types
        moved_inputs, moved_kwargs = to(inputs, kwargs, self.device_ids[0])
        return tuple(moved_inputs[0]), dict(moved_kwargs[0])

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a forward requests that its backward be averaged over the ranks."""
        return self._session.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        session = self._session
        session.set_sync(bool(value), session.in_no_sync and not value)

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Accumulate gradients on this rank, without averaging.

        A backward is not averaged if its forward ran inside the context (torch's
        contract), or if the backward itself runs inside.  The first averaged backward
        after it averages all that has accumulated.

        Parameters
        ----------
        enabled : bool, default True
            If False, the context does nothing.  torch's method has no arguments.

        Examples
        --------
        >>> import torch, torch.distributed as dist
        >>> from paceline import DistributedDataParallel
        >>> dist.init_process_group(
        ...     "gloo", store=dist.HashStore(), rank=0, world_size=1
        ... )
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> for micro in range(2):
        ...     with model.no_sync(enabled=micro < 1):
        ...         model(torch.ones(1, 2)).sum().backward()  # the last averages both
        >>> model.module.weight.grad
        tensor([[2., 2.]])
        >>> dist.destroy_process_group()
        """
        session = self._session
        before = session.sync, session.in_no_sync
        if enabled:
            session.set_sync(False, True)
        try:
            yield
        finally:
            if enabled:
                session.set_sync(*before)

    # ---- the end of a backward ------------------------------------------------------

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether :meth:`finalize_backward` ends a step, not its backward.

        Until then ``.grad`` is as within the backward.  Set it before a backward ends.
        """
        return self._session.options.is_manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.reducer._set_manual_finalization_required(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether :meth:`finalize_backward` must wait until the backward has ended."""
        # Only that shows which parameters are unused.
        is_late = self.find_unused_parameters or self.mixed_precision is not None
        is_first = self._session.log.iteration <= 1
        return self.require_manual_backward_finalization and (is_late or is_first)

    def finalize_backward(self) -> None:
        """Wait for the averages of the last backward, and write them to ``.grad``.

        Call it on every rank, in the same order with other collectives: after the
        backward, or in a hook of it once every parameter has a gradient.
        """
        self.reducer._finalize_backward_manual()

    # ---- hooks ----------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: comm_hooks.Hook) -> None:
        """Let ``hook`` average the gradients, bucket by bucket.

        Parameters
        ----------
        state : object
            Passed to the hook in each call, such as None or a process group.
        hook : callable
            ``hook(state, bucket)`` starts to average one
            ``torch.distributed.GradBucket`` and returns a
            ``torch.futures.Future[torch.Tensor]`` of the averaged ``bucket.buffer()``,
            with the same number of elements.  The hook divides by the number of ranks.

        Raises
        ------
        TypeError
            If the hook is not callable.
        ValueError
            If an annotation of the hook differs from torch's.
        RuntimeError
            If the wrapper already has a hook.  From ``backward()``: if the hook does
            not return a future of a tensor of that size.  ``backward()`` also raises
            exceptions of the hook and its future; other ranks raise ``PeerError``.

        Notes
        -----
        The contract is that of `torch's method
        <https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html>`_.  Where it differs:

        - Without ``bucket_cap_mb`` buckets hold up to 25 MiB, and the last up to 1 MiB.
          In the first backward they follow the reverse order of the parameters, later
          the order in which gradients arrived.
        - The buffer is a separate tensor: a hook may keep it.
        - bfloat16 hooks work on the CPU (``strict`` refuses them, as torch does).
        - A copy of the wrapper, and a model that was changed, keep the hook.
        - If a parameter gets a second gradient after its bucket was sent, every rank
          raises.
        - After a step that failed while the hook's work was in flight, later steps
          raise: a collective that only some ranks began would pair with the next one.

        Examples
        --------
        Each bucket travels as float16 (here there is one rank, so none is sent):

        >>> import torch, torch.distributed as dist
        >>> from paceline import DistributedDataParallel
        >>> from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        >>> dist.init_process_group(
        ...     "gloo", store=dist.HashStore(), rank=0, world_size=1
        ... )
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        >>> model(torch.full((1, 2), 3.0)).sum().backward()
        >>> model.module.weight.grad
        tensor([[3., 3.]])
        >>> dist.destroy_process_group()
        """
        if (error := comm_hooks.refusal(hook)) is not None:
            self._log_and_throw(type(error), str(error))  # type: ignore[no-untyped-call]
        session, hooks = self._session, self._session.hooks
        if session.options.strict:
            self._check_comm_hook(hook)  # type: ignore[no-untyped-call]  # torch's own
        hooks.refuse_second("register_comm_hook", "register_builtin_comm_hook")
        hooks.registered.append((hook, state))
        try:
            session.attach_comm_hook()
        except BaseException:
            hooks.registered.clear()
            raise
        hooks.name = getattr(hook, "__qualname__", type(hook).__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Let a hook that torch has written in C++ average the gradients.

        It is ``ALLREDUCE``, the default, or ``FP16_COMPRESS``.
        """
        kinds = dist.BuiltinCommHookType  # type: ignore[attr-defined]
        if not isinstance(comm_hook_type, kinds):
            raise TypeError(
                f"comm_hook_type is {comm_hook_type!r}: give a "
                "torch.distributed.BuiltinCommHookType"
            )
        hooks = self._session.hooks
        hooks.refuse_second("register_builtin_comm_hook", "register_comm_hook")
        if comm_hook_type == kinds.FP16_COMPRESS:
            self.register_comm_hook(
                self.process_group, default_hooks.fp16_compress_hook
            )
        hooks.is_builtin, hooks.name = True, str(comm_hook_type)

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, *location: Any, **named: Any
    ) -> None:
        """Let ``hook(state, {name: buffer})`` bring buffers to all ranks.

        It may return a list of futures, for which the next backward's end waits.  As in
        torch, it runs after the forward, or where ``comm_hook_location`` says, and a
        hook on one rank must be on all.  It runs in forwards that record gradients;
        torch also runs it in the first evaluation after one.
        """
        super()._register_buffer_comm_hook(state, hook, *location, **named)
        self._session.wrap_anew()

    # ---- settings -------------------------------------------------------------------

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether rank 0's buffers reach the other ranks in training."""
        return self._session.options.sync_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        session, options = self._session, self._session.options
        if bool(value) != options.sync_buffers:
            session.options = dataclasses.replace(options, sync_buffers=bool(value))
            session.wrap_anew()

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of :attr:`forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Tell whether the next synchronised step brings buffers to all ranks."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and len(self.modules_buffers) > 0
        )

    def _set_static_graph(self) -> None:
        """Declare that every step uses the same parameters equally often.

        This gains nothing here, since the graph may change.  Under ``strict`` a change
        raises, and the call must come before training.
        """
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.",
                stacklevel=2,
            )
            return
        session = self._session
        is_strict = session.options.strict and session.reducer is not None
        if is_strict and session.log.iteration > 0:
            self._log_and_throw(RuntimeError, strict.LATE_STATIC)  # type: ignore[no-untyped-call]
        self.static_graph = True
        self._static_graph_delay_allreduce_enqueued = False
        session.follow_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, "
                "`_set_static_graph` will detect unused parameters automatically, so "
                "you do not need to set find_unused_parameters=true, just be sure "
                "these unused parameters will not change during training loop while "
                "calling `_set_static_graph`.",
                stacklevel=2,
            )

    # ---- its insides ----------------------------------------------------------------

    @property
    def reducer(self) -> torch_reducer.ReducerFacade:  # type: ignore[override]
        """The stand-in for ``torch.distributed.Reducer``."""
        return torch_reducer.ReducerFacade(self)

    @property
    def logger(self) -> torch_reducer.LoggerFacade:  # type: ignore[override]
        """The stand-in for ``torch.distributed.Logger``."""
        return torch_reducer.LoggerFacade(self)

    @property
    def _comm_hooks(self) -> list[Any]:  # type: ignore[override]
        return self._session.hooks.registered

    def _read_arguments(
        self, device_ids: Any, output_device: Any, named: Any, hooked: Any, model: Model
    ) -> None:
        """Check the constructor's arguments that depend on the model.

        `named` and `hooked` are torch's, for gradients that torch averages later,
        together: here they are averaged with all others.
        """
        self.device_ids, self.output_device = placement.read_devices(
            device_ids, output_device, [p.device for _, p in model.parameters]
        )
        self._moves_inputs = bool(self.device_ids)
        self._delay_all_reduce_params = [p for _, p in named or ()]
        known = {id(p) for p in model.trainable}
        unknown = [name for name, p in named or () if id(p) not in known]
        if unknown:
            raise ValueError(
                f"delay_all_reduce_named_params has {unknown}, which are not trainable "
                "parameters of the module: give pairs of its named_parameters()"
            )
        if hooked is not None and not isinstance(hooked, torch.Tensor):
            raise TypeError(
                f"param_to_hook_all_reduce is {type(hooked).__name__}: give a parameter"
            )

    def _follow_module(self, device: torch.device) -> None:
        """Move inputs to the module's current device, if inputs are moved at all."""
        index = _gpu.machine.index_of(device) if self._moves_inputs else None
        ids = None if index is None else [index]
        if self.device_ids != ids:
            self.device_ids, self.output_device = ids, index

    def _show_model(self, model: Model) -> None:
        """Set attributes that torch's class keeps of its model; follow its device."""
        self.device = model.parameters[0][1].device
        self.device_type = self.device.type
        self._follow_module(self.device)
        delayed = {id(p) for p in self._delay_all_reduce_params}
        self.parameters_to_ignore = set(
            getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        ) | {name for name, p in model.parameters if id(p) in delayed}
        if model.buffers or not hasattr(self, "modules_buffers"):
            self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        self._module_parameters = [
            p for p in model.tensors(has_buffers=False) if id(p) not in delayed
        ]


_RUN, _BEFORE = TorchSurface._run_ddp_forward, TorchSurface._pre_forward
_AFTER = TorchSurface._post_forward
_move_uncompiled = torch_core.uncompiled(TorchSurface._move_to_device)

torch_core.skip_frames(
    TorchSurface.forward,
    TorchSurface._forward,
    TorchSurface._has_own_parts,
    TorchSurface._forward_in_parts,
    TorchSurface._run_ddp_forward,
    TorchSurface._pre_forward,
    TorchSurface._post_forward,
    TorchSurface.will_sync_module_buffers,
    torch_core.is_profiling,
    torch_core.exchange_active_ddp,
)
