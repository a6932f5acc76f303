"""What torch's wrapper answers besides training: settings, hooks, and its insides.

Methods of torch's class that only ask ``self.reducer`` or ``self.logger`` are inherited
as they are, and ask what :mod:`paceline._ddp.torch_reducer` answers.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from paceline import _gpu
from paceline._compat import torch_core
from paceline._ddp import placement, strict, torch_reducer
from paceline._ddp.model_spec import Model
from paceline._ddp.session import Session


class TorchSurface(TorchDDP):
    """The parts of a wrapper that programs reach for by torch's private names."""

    module: torch.nn.Module
    _session: Session
    _comm_hook_name: str = ""
    _moves_inputs = False  # to the GPU: whether device_ids were given
    _ddp_sink_clone = True  # outputs are the module's own, and never cloned
    _use_python_reducer = False
    _has_rebuilt_buckets = False
    _delay_grad_buffer = None  # delayed gradients are averaged with all others

    @property
    def reducer(self) -> torch_reducer.Reducer:  # type: ignore[override]
        """What answers for ``torch.distributed.Reducer``."""
        return torch_reducer.Reducer(self)

    @property
    def logger(self) -> torch_reducer.Logger:  # type: ignore[override]
        """What answers for ``torch.distributed.Logger``."""
        return torch_reducer.Logger(self)

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

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, *location: Any, **named: Any
    ) -> None:
        """Have ``hook(state, {name: buffer})`` bring buffers to all ranks.

        Parameters
        ----------
        state : object
            Given to the hook.
        hook : callable
            May return a list of futures, which the next backward's end awaits.
        comm_hook_location : optional
            torch's ``_BufferCommHookLocation``: before the forward, or after it (the
            default).

        Notes
        -----
        As in torch, a hook on one rank must be on all.  It is called in forwards that
        record gradients; torch also calls it in the first evaluation after one.
        """
        super()._register_buffer_comm_hook(state, hook, *location, **named)
        self._session.wrap_anew()

    def _set_static_graph(self) -> None:
        """Declare that every step uses the same parameters, as often.

        Nothing is gained: the graph may change.  Under ``strict`` it is held to this,
        and the call must come before training.
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

    # ---- for the session ------------------------------------------------------------

    def _read_arguments(
        self, model: Model, device_ids: Any, output_device: Any, named: Any, hooked: Any
    ) -> None:
        """Check those of the constructor's arguments that say something of the model.

        Parameters
        ----------
        model : Model
            The module's.
        device_ids, output_device
            As given.
        named, hooked
            torch's arguments for gradients that are averaged together, later.  Here
            they are averaged with all others, so the two say nothing new.
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
                f"delay_all_reduce_named_params has {unknown}, which are no trainable "
                "parameters of the module: give pairs of its named_parameters()"
            )
        if hooked is not None and not isinstance(hooked, torch.Tensor):
            raise TypeError(
                f"param_to_hook_all_reduce is {type(hooked).__name__}: give a parameter"
            )

    def _follow_module(self, device: torch.device) -> None:
        """Have inputs moved to where the module is now, if they were to be moved."""
        index = _gpu.machine.index_of(device)
        is_moved_to = index if self._moves_inputs else None
        self.device_ids = None if is_moved_to is None else [is_moved_to]
        self.output_device = is_moved_to

    def _show_model(self, model: Model) -> None:
        """Show what torch's class keeps of its model."""
        self.device = model.parameters[0][1].device
        self.device_type = self.device.type
        delayed = {id(p) for p in self._delay_all_reduce_params}
        self.parameters_to_ignore = set(
            getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        ) | {name for name, p in model.parameters if id(p) in delayed}
        if model.buffers or not hasattr(self, "modules_buffers"):
            self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        self._module_parameters = [
            p for p in model.tensors(has_buffers=False) if id(p) not in delayed
        ]


torch_core.skip_frames(TorchSurface.will_sync_module_buffers)
