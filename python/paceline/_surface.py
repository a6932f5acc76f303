"""What torch's wrapper answers besides training: settings, hooks, and its insides.

Methods of torch's class that only ask ``self.reducer`` or ``self.logger`` are inherited
as they are, and ask what :mod:`paceline._facade` answers.
"""

from __future__ import annotations

import dataclasses
import warnings
from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from paceline import _facade, _native, _strict, _torch
from paceline._finish import Finish, InBackward, Steady
from paceline._join import Joining
from paceline._journal import Journal
from paceline._model import Model
from paceline._options import Options
from paceline._pass import Demand, Passes


class Always:
    """Stands for a :class:`paceline._native.Watch` that has seen a change."""

    def changed(self) -> bool:
        """Tell that the model is to be wrapped anew."""
        return True


class Surface(Joining):
    """The parts of a wrapper that programs reach for by torch's private names."""

    module: torch.nn.Module
    _model: Model
    _options: Options
    _finish: Finish
    _journal: Journal
    _demand: Demand
    _passes: Passes
    _steady: Steady | None
    _is_alone: bool
    _is_copy: bool
    _is_moved: bool  # was alone without a reducer, and has another group since
    _comm_hook_name: str = ""
    _trainable: list[torch.nn.Parameter]
    _watch: _native.Watch | Always  # type: ignore[assignment]
    _lazy_init_ran: bool
    _ddp_sink_clone = True  # outputs are the module's own, and never cloned
    _use_python_reducer = False
    _has_rebuilt_buckets = False
    _delay_grad_buffer = None  # delayed gradients are averaged with all others

    def _open_books(self) -> None:
        """Make what a wrapper has of its own: at construction, and for a copy."""
        self._finish = Finish()
        self._journal = Journal()
        self._demand = Demand()
        self._passes = Passes()
        self._steady = None
        self._lazy_init_ran = False
        self._is_moved = False

    # ---- facades --------------------------------------------------------------------

    @property
    def reducer(self) -> _facade.Reducer:  # type: ignore[override]
        """What answers for ``torch.distributed.Reducer``."""
        return _facade.Reducer(self)

    @property
    def logger(self) -> _facade.Logger:  # type: ignore[override]
        """What answers for ``torch.distributed.Logger``."""
        return _facade.Logger(self)

    @abstractmethod
    def _set_up(self, options: Options) -> None: ...

    def _set_up_again(self, copies: bool = True) -> None:
        """Make the world, in place of none; with rank 0's tensors, or as they are."""
        options = self._options
        is_synchronised = self.require_backward_grad_sync
        if copies:
            self._set_up(options)
        else:
            self._set_up(dataclasses.replace(options, sync_at_start=False))
            self._options = options
        self.require_backward_grad_sync = is_synchronised

    def _note_join(self) -> None:
        self.logger._set_uneven_input_join()

    def _name_comm_hook(self, name: str) -> None:
        self._comm_hook_name = name

    def _attach_books(self, reducer: _native.Reducer) -> None:
        """Give a new reducer what is to be called, and write down its buckets."""
        self._journal.first_buckets = reducer.buckets
        reducer.strict = self._options.strict and not self.static_graph
        self._attach_steady(reducer)
        self._finish.attach(reducer)

    def _attach_steady(self, reducer: _native.Reducer) -> None:
        if self._steady is not None:
            self._finish.always.remove(self._steady)
            self._steady = None
        if self._options.strict and self.static_graph:
            self._steady = Steady(reducer, self._journal)
            self._finish.always.append(self._steady)

    def _compare_with_last_step(self) -> None:
        if self._reducer is not None and not self._reducer.is_active:
            self._journal.compare(self._reducer.fires)

    # ---- refusals of torch ----------------------------------------------------------

    def _refuse_unused(self) -> None:
        """Raise as torch does, under strict, if the last step left parameters out."""
        reducer, options = self._reducer, self._options
        if reducer is None or not options.strict or reducer.step == 0:
            return
        expected = self._steady.first if self._steady is not None else None
        if expected is None and self.find_unused_parameters:
            return
        words = _strict.words_of_unused(
            self._model.trainable_names,
            self._world.rank,
            reducer.fires,
            expected,
            has_changed=self._steady is not None and self._steady.has_changed,
        )
        if words is not None:
            self._world.note_exception(words)
            self._log_and_throw(RuntimeError, words)  # type: ignore[no-untyped-call]

    # ---- optimizers that run in backward --------------------------------------------

    def _lazy_init(self) -> None:
        """Take over optimizers that were given to parameters, at the first forward."""
        self._lazy_init_ran = True
        in_backward = InBackward.of(self._module_parameters)
        if in_backward is None:
            return
        self._finish.always.append(in_backward)
        if self._reducer is None and self._is_alone:
            self._set_up_again()  # one rank needs a reducer now
        self._finish.attach(self._reducer)

    @property
    def _needs_reducer(self) -> bool:
        """Whether a rank that is alone needs one, which has nothing to average."""
        return bool(self._comm_hooks or self._options.strict or self._finish.always)

    # ---- settings -------------------------------------------------------------------

    def _wrap_anew(self) -> None:
        """Have the next forward that records gradients make a new world."""
        if self._reducer is not None:
            self._watch = Always()

    def _join_group(self, group: dist.ProcessGroup) -> None:
        self.process_group = group
        self._options = dataclasses.replace(self._options, group=group)
        self._is_moved = self._reducer is None
        self._wrap_anew()

    @property
    def _is_to_meet(self) -> bool:
        """Whether the ranks of the group are still to be met."""
        return self._is_copy or self._is_moved

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether rank 0's buffers reach the other ranks in training."""
        return self._options.sync_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        if bool(value) != self._options.sync_buffers:
            self._options = dataclasses.replace(self._options, sync_buffers=bool(value))
            self._wrap_anew()

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of :attr:`forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def _sends_buffers(self) -> bool:
        """Whether buffers go with the gradients: not where a hook has them."""
        return self._options.sync_buffers and "buffer_hook" not in self.__dict__

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
        self._wrap_anew()

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
        if self._options.strict and self._reducer is not None:
            words = _strict.words_of_late_static(self._reducer.step)
            if words is not None:
                self._log_and_throw(RuntimeError, words)  # type: ignore[no-untyped-call]
        self.static_graph = True
        self._static_graph_delay_allreduce_enqueued = False
        if self._reducer is not None:
            self._attach_books(self._reducer)
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, "
                "`_set_static_graph` will detect unused parameters automatically, so "
                "you do not need to set find_unused_parameters=true, just be sure "
                "these unused parameters will not change during training loop while "
                "calling `_set_static_graph`.",
                stacklevel=2,
            )

    def _delay(self, named: Any, hooked: Any, model: Model) -> None:
        """Take torch's arguments for gradients that are averaged together, later.

        Here they are averaged with all others, so the two say nothing new.
        """
        self._delay_all_reduce_params = [p for _, p in named or ()]
        self._delay_all_reduce_all_params = False
        known = {id(p) for p in model.trainable}
        strangers = [name for name, p in named or () if id(p) not in known]
        if strangers:
            raise ValueError(
                f"delay_all_reduce_named_params has {strangers}, which are no "
                "trainable parameters of the module: give pairs of its "
                "named_parameters()"
            )
        if hooked is not None and not isinstance(hooked, torch.Tensor):
            raise TypeError(
                f"param_to_hook_all_reduce is {type(hooked).__name__}: give a parameter"
            )


_torch.skip_frames(Surface.will_sync_module_buffers)
