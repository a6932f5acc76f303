"""A wrapper's forward: what comes before the module's own, and after it."""

from __future__ import annotations

import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from paceline import _native
from paceline._compat import torch_core, torch_graph
from paceline._ddp.autograd_contexts import Contexts
from paceline._ddp.join import notify_join
from paceline._ddp.model_spec import WRAP_ONCE
from paceline._ddp.session import Membership, Session


class ForwardPass:
    """The hook on a forward's outputs: it says that the backward of them begins.

    The end of that is then known too: also where every gradient comes out of a backward
    inside it, as with reentrant checkpointing.  Each forward has one of its own, which
    remembers whether ``no_sync`` was on when it ended, and that one forward has one
    backward to come, however many its outputs.

    Parameters
    ----------
    session : Session
        Of the wrapper that is about to run its module.  It knows the model, which may
        keep its outputs, and with them this: it is referred to weakly.
    reducer : paceline._native.Reducer
        The session's, now.
    on_backward : callable, optional
        Called first as a backward begins.
    """

    __slots__ = ("_is_synchronised", "_on_backward", "_reducer", "_session", "_token")

    def __init__(
        self,
        session: Session,
        reducer: _native.Reducer,
        on_backward: Callable[[], None] | None = None,
    ) -> None:
        self._session = weakref.ref(session)
        self._reducer = reducer
        self._on_backward = on_backward
        self._is_synchronised = reducer.sync
        self._token = 0  # the reducer's, of the forward whose backward is to come

    def watch(self, output: Any) -> bool:
        """Have the beginning of the backward of ``output`` noticed, if it can be."""
        is_watched = False
        for leaf in torch_core.leaves_of(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self)  # type: ignore[no-untyped-call]
                is_watched = True
        return is_watched

    def forward_ends(self, output: Any, is_training: bool) -> None:
        """Watch what the forward has returned, and say so to the peers."""
        self._is_synchronised = self._reducer.sync
        is_watched = self.watch(output)
        self._token = self._reducer.forward_ends(is_watched, is_training)

    def forward_fails(self) -> None:
        """Say that the module has raised: no backward comes of this."""
        self._reducer.forward_fails()
        session = self._session()
        if session is not None:
            session.world.note_exception(traceback.format_exc())

    def __call__(self, gradient: torch.Tensor) -> None:
        reducer, session = self._reducer, self._session()
        if self._on_backward is None and session is not None:
            # RPC may have come since the forward.
            self._on_backward = _watch_contexts(session, reducer)
        if self._on_backward is not None:
            self._on_backward()
        is_synchronised = self._is_synchronised or (
            session is not None and session.requested_step == reducer.step
        )
        token, self._token = self._token, 0
        # Where the model was wrapped anew since, this is a backward of that, too.
        is_begun = reducer.on_output(is_synchronised, token)
        if not is_begun and session is not None and session.reducer is not None:
            session.reducer.on_output(is_synchronised, 0)


def _watch_contexts(
    session: Session, reducer: _native.Reducer
) -> Callable[[], None] | None:
    """Have gradients seen that go to a context of torch.distributed.autograd.

    Return what is to be called as the backward begins; None where there is no RPC.
    """
    if not torch_graph.is_rpc_used():
        return None
    contexts = reducer.contexts
    if not isinstance(contexts, Contexts):
        reducer.contexts = contexts = Contexts(reducer, session.trainable)
    return functools.partial(contexts.enter, contexts.watch())


class Forward(TorchDDP):
    """Runs the module, and prepares the backward to come."""

    _session: Session

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
        if torch_core.is_profiling():
            with torch.autograd.profiler.record_function(
                "DistributedDataParallel.forward"
            ):
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch_core.is_compile_used() or self._has_own_parts():
            return self._forward_in_parts(inputs, kwargs)
        forward_pass = self._begin_forward()
        try:
            if self.device_ids:
                inputs, kwargs = self._move_to_device(inputs, kwargs)
            # self.module, without torch's search for it
            output = self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]
        except BaseException:
            if forward_pass is not None:
                forward_pass.forward_fails()
            raise
        self._end_forward(output, forward_pass)
        return output

    def _has_own_parts(self) -> bool:
        """Tell whether a subclass, or this object, has parts of its own."""
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
                opened.append(_begin_uncompiled(self, False))
            output = self._run_ddp_forward(*inputs, **kwargs)
            return self._post_forward(output)
        except BaseException:
            for forward_pass in opened[n_opened:]:
                if forward_pass is not None:
                    forward_pass.forward_fails()
            raise
        finally:
            del opened[n_opened:]

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module as the one that torch.compile splits at its buckets."""
        before = torch_core.exchange_active_ddp(self)
        try:
            return self.module(*inputs, **kwargs)
        finally:
            torch_core.exchange_active_ddp(before)

    def _pre_forward(
        self, *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Do what comes before the module's forward; return the arguments for that.

        Whoever runs the module himself (``replicate()``, say) calls this before, and
        :meth:`_post_forward` after it, in the same thread.
        """
        self._session.open_forwards.items.append(_begin_uncompiled(self))
        if self.device_ids:
            inputs, kwargs = _move_uncompiled(self, inputs, kwargs)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        """Do what comes after the module's forward; return its output, itself."""
        _end_uncompiled(self, output, self._session.open_forwards.items.pop())
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

    def _end_forward(self, output: Any, forward_pass: ForwardPass | None) -> None:
        """Watch the output for its backward, and note how this forward has ended."""
        attributes, session = self.__dict__, self._session
        is_synchronised = False
        if torch.is_grad_enabled():
            is_synchronised = session.syncs_buffers = session.sync
            if "buffer_hook" in attributes and self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
                self._sync_buffers()  # type: ignore[no-untyped-call]
            if forward_pass is not None:
                forward_pass.forward_ends(output, self.training)
                if session.strict_check is not None and is_synchronised:
                    session.strict_check.forward_ends(output)
            if is_synchronised and session.log.is_measuring:
                session.log.forward_ends()
        # Not by torch's setter, which takes a microsecond.
        attributes["require_forward_param_sync"] = is_synchronised

    def _begin_forward(self, has_buffers: bool = True) -> ForwardPass | None:
        """Return what watches the coming backward, or None if nothing has to.

        With ``has_buffers`` the module takes over rank 0's buffers.
        """
        session = self._session
        if session.log.is_measuring and not torch_core.is_in_backward():
            session.log.drop_failed()
        if not torch.is_grad_enabled():
            is_to_apply = has_buffers and self.require_forward_param_sync
            if session.reducer is not None and is_to_apply:
                session.reducer.apply_buffers()
            return None
        if sys.is_finalizing():  # torch aborts over a graph that is left half made
            raise RuntimeError(
                "Python is ending: its ranks are not, perhaps, so nothing is trained "
                "now; train before the last line of the program"
            )
        if torch_core.is_in_torch_ddp():
            self._refuse_torch_around()
        if not session.has_taken_optimizers:
            session.take_optimizers()
        has_changed = session.has_changed()
        if has_changed and session.has_no_part():
            return None
        if self._join_config.enable and session.membership is not Membership.ALONE:
            notify_join(self)
        if has_changed:
            session.adopt_changes(has_buffers)
        has_hook = has_buffers and "buffer_hook" in self.__dict__
        if has_hook and self._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
            self._sync_buffers()  # type: ignore[no-untyped-call]
        reducer = session.reducer
        if not torch_core.is_in_backward():
            if session.strict_check is not None:
                session.refuse_unused()
            if session.sync:
                session.log.forward_begins(
                    session.trainable, reducer, session.callbacks
                )
        if reducer is None:
            return None
        reducer.forward_begins()
        if has_buffers and session.model.buffers and session.syncs_buffers:
            self._take_buffers(reducer)
        session.requested_step = -1
        return ForwardPass(session, reducer, _watch_contexts(session, reducer))

    def _refuse_torch_around(self) -> None:
        """Raise where torch's wrapper that runs its forward now is around this one."""
        around = torch_core.torch_ddp_in_forward()
        if any(module is self for module in around.modules()):
            raise ValueError(
                "torch's DistributedDataParallel is around this wrapper and averages "
                f"the same gradients: {WRAP_ONCE}"
            )

    def _take_buffers(self, reducer: _native.Reducer) -> None:
        """Take over rank 0's buffers, which torch's class sends before each forward."""
        if not self._session.join.is_active:
            reducer.sync_buffers()
        elif not torch_core.is_in_backward():
            reducer.apply_buffers()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a forward asks for its backward to be averaged over the ranks."""
        return self._session.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        session = self._session
        session.set_sync(bool(value), session.in_no_sync and not value)

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
        session = self._session
        before = session.sync, session.in_no_sync
        session.set_sync(False, True)
        try:
            yield
        finally:
            session.set_sync(*before)


_RUN, _BEFORE = Forward._run_ddp_forward, Forward._pre_forward
_AFTER = Forward._post_forward

# What torch.compile is given is the module's forward, and none of what is round it.
_begin_uncompiled = torch_core.uncompiled(Forward._begin_forward)
_end_uncompiled = torch_core.uncompiled(Forward._end_forward)
_move_uncompiled = torch_core.uncompiled(Forward._move_to_device)
torch_core.skip_frames(
    ForwardPass.__call__,
    Forward.forward,
    Forward._forward,
    Forward._has_own_parts,
    Forward._forward_in_parts,
    Forward._run_ddp_forward,
    Forward._pre_forward,
    Forward._post_forward,
    torch_core.is_profiling,
    torch_core.is_compile_used,
    torch_core.exchange_active_ddp,
)
