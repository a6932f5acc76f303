"""A wrapper's forward: what comes before the module's own, and after it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline import _native, _torch
from paceline._model import has_nothing_to_train, is_stateless_call
from paceline._pass import Pass
from paceline._surface import Always, Surface


class Forward(Surface):
    """Runs the module, and prepares the backward to come."""

    _sync_without_peers: bool

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
        RuntimeError
            Under ``strict``: if the last step left parameters out, in torch's words.
        """
        if _torch.is_profiling():
            with torch.autograd.profiler.record_function(
                "DistributedDataParallel.forward"
            ):
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiles = _torch.is_compile_used()
        one_pass = _begin_uncompiled(self) if compiles else self._begin_forward()
        try:
            if self.device_ids:
                inputs, kwargs = _move_uncompiled(self, inputs, kwargs)
            if compiles:
                output = self._run_ddp_forward(*inputs, **kwargs)
            else:  # self.module, without torch's search for it
                output = self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]
        except BaseException:
            if one_pass is not None:
                one_pass.forward_fails()
                self._world.note_exception(traceback.format_exc())
            raise
        if compiles:
            _end_uncompiled(self, output, one_pass)
        else:
            self._end_forward(output, one_pass)
        return output

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module as the one that torch.compile splits at its buckets."""
        before = _torch.exchange_active_ddp(self)
        try:
            return self.module(*inputs, **kwargs)
        finally:
            _torch.exchange_active_ddp(before)

    def _pre_forward(
        self, *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Do what comes before the module's forward; return the arguments for that.

        Whoever runs the module himself (``replicate()``, say) calls this before, and
        :meth:`_post_forward` after it, in the same thread.
        """
        self._passes.open.append(_begin_uncompiled(self))
        if self.device_ids:
            inputs, kwargs = _move_uncompiled(self, inputs, kwargs)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        """Do what comes after the module's forward; return its output, itself."""
        _end_uncompiled(self, output, self._passes.open.pop())
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

    def _end_forward(self, output: Any, one_pass: Pass | None) -> None:
        """Watch the output for its backward, and leave the books of this forward."""
        attributes = self.__dict__
        is_synchronised = False
        if torch.is_grad_enabled():
            is_synchronised = self.require_backward_grad_sync
            if "buffer_hook" in attributes and self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
                self._sync_buffers()  # type: ignore[no-untyped-call]
            if one_pass is not None:
                one_pass.forward_ends(output)
            if is_synchronised and self._journal.is_measuring:
                self._journal.forward_ends()
        attributes["require_forward_param_sync"] = is_synchronised

    def _begin_forward(self) -> Pass | None:
        """Return what watches the backward to come; None where there is nothing."""
        reducer = self._reducer
        if not torch.is_grad_enabled():
            if reducer is not None:
                reducer.apply_buffers()
            return None
        if not self._lazy_init_ran:
            self._lazy_init()
            reducer = self._reducer
        if reducer is None:
            is_changed = self._is_copy or self._is_moved or not self._is_alone
        else:
            is_changed = self._watch.changed()
        if is_changed and self._has_no_part(reducer):
            return None
        if self._join_config.enable and not self._is_alone:
            self._notify_join()
        if is_changed:
            is_new = reducer is None
            reducer = self._meet_as_copy() if is_new else self._adopt_changes()
        if "buffer_hook" in self.__dict__ and self._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
            self._sync_buffers()  # type: ignore[no-untyped-call]
        if self.require_backward_grad_sync and not _torch.is_in_backward():
            self._begin_synchronised(reducer)
        if reducer is None:
            return None
        reducer.forward_begins()
        self._demand.step = -1
        return Pass(reducer, self._demand)

    def _has_no_part(self, reducer: _native.Reducer | None) -> bool:
        """Tell whether a model that has changed, or is to meet, runs for itself."""
        if reducer is None:
            return self._is_to_meet and is_stateless_call(self.module)
        return has_nothing_to_train(self.module) or is_stateless_call(self.module)

    def _begin_synchronised(self, reducer: _native.Reducer | None) -> None:
        journal = self._journal
        if reducer is not None:
            if self._options.strict:
                self._refuse_unused()
            if journal.is_static and not reducer.is_active:
                journal.compare(reducer.fires)
        journal.forward_begins(self._trainable, reducer, self._finish)

    def _meet_as_copy(self) -> _native.Reducer | None:
        """Have a copy (deepcopy, unpickled) that is to be trained meet its peers.

        Not before: a rank may make a copy alone, to save or to evaluate it.  A wrapper
        that was alone and was given another group is met in the same way.
        """
        if self._is_to_meet and not has_nothing_to_train(self.module):
            self._set_up_again(copies=self._is_copy)
        elif not self._is_alone and not self._is_to_meet:
            raise RuntimeError(
                "wrapping the model anew after a change has failed: make a new "
                "DistributedDataParallel of wrapper.module on every rank"
            )
        return self._reducer

    def _adopt_changes(self) -> _native.Reducer | None:
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
        self._reducer.on_finish = None
        self._world.leave()
        self._reducer = None
        self._sync_without_peers = sync
        self._set_up_again(copies=not isinstance(self._watch, Always))
        return self._reducer  # None: the new group has no other rank

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
        >>> import torch, torch.distributed as dist
        >>> from paceline import DistributedDataParallel
        >>> dist.init_process_group(
        ...     "gloo", store=dist.HashStore(), rank=0, world_size=1
        ... )
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> with model.no_sync():
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model(torch.ones(1, 2)).sum().backward()  # averages the sum of both
        >>> model.module.weight.grad
        tensor([[2., 2.]])
        >>> dist.destroy_process_group()
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


# What torch.compile is given is the module's forward, and none of what is round it.
_begin_uncompiled = _torch.uncompiled(Forward._begin_forward)
_end_uncompiled = _torch.uncompiled(Forward._end_forward)
_move_uncompiled = _torch.uncompiled(Forward._move_to_device)
_torch.skip_frames(
    Forward.forward,
    Forward._forward,
    Forward._run_ddp_forward,
    Forward._pre_forward,
    Forward._post_forward,
    _torch.is_profiling,
    _torch.is_compile_used,
    _torch.exchange_active_ddp,
)
