"""A wrapper's work before and after the module's own forward."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from paceline import _native
from paceline._compat import torch_core
from paceline._ddp.forward_pass import ForwardPass
from paceline._ddp.join import notify_join
from paceline._ddp.model_spec import WRAP_ONCE
from paceline._ddp.session import Phase, Session


def begin(
    wrapper: TorchDDP, session: Session, has_buffers: bool = True
) -> ForwardPass | None:
    """Return the watcher of the coming backward, or None if none is needed.

    With ``has_buffers`` the module takes over rank 0's buffers.
    """
    if not torch.is_grad_enabled():
        is_to_apply = has_buffers and wrapper.require_forward_param_sync
        if session.reducer is not None and is_to_apply:
            session.reducer.apply_buffers()
        return None
    try:
        reducer = _begin_training(wrapper, session, has_buffers)
    except BaseException:
        if session.reducer is not None:
            session.reducer.forward_fails(wrapper.training)
        raise
    if reducer is None:
        return None
    if has_buffers and session.model.buffers and session.syncs_buffers:
        # Take over rank 0's buffers, which torch's class sends before each forward.
        if not session.join.is_active:
            reducer.sync_buffers()
        elif not torch_core.is_in_backward():
            reducer.apply_buffers()
    session.requested_step = -1
    return ForwardPass(session, reducer)


def _begin_training(
    wrapper: TorchDDP, session: Session, has_buffers: bool
) -> _native.Reducer | None:
    """Begin a forward that records gradients; return the reducer, if there is one."""
    if sys.is_finalizing():  # torch aborts over a half-made graph
        raise RuntimeError(
            "Python is ending, perhaps on this rank only, so nothing is trained "
            "now: train before the last line of the program"
        )
    around = torch_core.torch_ddp_in_forward()
    if around is not None and any(part is wrapper for part in around.modules()):
        raise ValueError(
            "torch's DistributedDataParallel is around this wrapper and averages "
            f"the same gradients: {WRAP_ONCE}"
        )
    if not session.has_taken_optimizers:
        session.take_optimizers()
    phase = session.next_phase()
    if phase is Phase.APART:
        return None
    if session.join.raises and phase is Phase.FAILED:  # the ranks count in the world
        session.adopt(phase, has_buffers)
        phase = session.phase
    if wrapper._join_config.enable and session.phase is not Phase.ALONE:
        notify_join(wrapper, session)
    session.adopt(phase, has_buffers)
    has_hook = has_buffers and "buffer_hook" in wrapper.__dict__
    if has_hook and wrapper._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
        wrapper._sync_buffers()  # type: ignore[no-untyped-call]
    reducer = session.reducer
    if reducer is not None:
        reducer.forward_begins()
    if not torch_core.is_in_backward():
        if session.strict_check is not None:
            session.refuse_unused()
        if session.sync:
            session.log.forward_begins(session)
    return reducer


def end(
    wrapper: TorchDDP, session: Session, output: Any, forward_pass: ForwardPass | None
) -> None:
    """Watch the output for its backward, and record how this forward ended."""
    attributes = wrapper.__dict__
    is_synchronised = False
    if torch.is_grad_enabled():
        is_synchronised = session.syncs_buffers = session.sync
        if "buffer_hook" in attributes and wrapper._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
            wrapper._sync_buffers()  # type: ignore[no-untyped-call]
        if forward_pass is not None:
            forward_pass.forward_ends(output, wrapper.training)
            if session.strict_check is not None and is_synchronised:
                session.strict_check.forward_ends(output)
    # Bypass torch's setter, which takes a microsecond.
    attributes["require_forward_param_sync"] = is_synchronised


# torch.compile gets the module's forward only, without the code around it.
begin_uncompiled = torch_core.uncompiled(begin)
end_uncompiled = torch_core.uncompiled(end)
