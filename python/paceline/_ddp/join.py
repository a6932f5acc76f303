"""Uneven numbers of batches: ranks that ran out take shadow steps for the rest.

Inside ``model.join()`` the ranks that still train take ordinary steps.  A rank that
leaves the context takes *shadow steps*, with zeros (csrc/reducer/step.c),
until a step shows that no rank had gradients; then all take over the model of the last
rank.  So all data goes through shared memory, no forward communicates, and every other
rank notices one that fails.

torch's own ``Join([...])``, which serves several models and sharded optimizers, counts
forwards over the process group instead, and calls the hook of ``join_hook()``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import traceback
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from paceline._compat import torch_core, torch_groups
from paceline._ddp.model_spec import Model, copy_model, sum_over_ranks
from paceline._ddp.session import JoinState, Session, ThreadList


def notify_join(wrapper: Any, session: Session) -> None:
    """Tell joined ranks of a forward, and whether its backward is synchronised."""
    if torch_core.is_in_backward():
        return  # a checkpoint's recomputation
    if session.join.raises:
        if _count_ranks_that_go_on(session, True) < session.world.world_size:
            session.join.has_ended_early = True
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all "
                "ranks."
            )
        return
    session.join.is_active = True
    Join.notify_join_context(wrapper)
    _begin_count(wrapper, session.sync)


def _count_ranks_that_go_on(session: Session, goes_on: bool) -> int:
    """Count the ranks that have another batch; each forward asks, and the end."""
    count = torch.tensor([int(goes_on)], device="cpu")
    return int(sum_over_ranks(session.world, count))


def _begin_count(wrapper: Any, is_synchronised: bool) -> tuple[torch.Tensor, Any]:
    """Start to count ranks with a synchronised backward, as torch's class does."""
    is_on_gpus = torch_groups.is_device_bound(wrapper.process_group)
    device = wrapper.device if is_on_gpus else "cpu"
    count = torch.tensor([float(is_synchronised)], device=device)
    return count, dist.all_reduce(count, group=wrapper.process_group, async_op=True)


def _take_model_of(wrapper: Any, session: Session, rank: int) -> None:
    """Take over the parameters, and perhaps buffers, of the rank that ran out last."""
    model = Model.of(wrapper.module)
    tensors = model.tensors(session.options.sync_buffers)
    copy_model(session.world, session.options.group, tensors, rank)
    wrapper._authoritative_rank = rank  # torch's name for it


def _abandon(session: Session, error: BaseException | None) -> None:
    """Tell the peers that this rank leaves a join context before its end."""
    if session.reducer is not None:
        text = "".join(traceback.format_exception(error)) if error else ""
        session.reducer.abandon(text or "it left a join context by an exception")


_open_contexts = ThreadList()  # at most one a thread


class JoinContext:
    """The context manager that a wrapper's ``join()`` returns."""

    def __init__(
        self, wrapper: Any, session: Session, enable: bool, state: JoinState
    ) -> None:
        self._wrapper = wrapper
        self._session = session
        self._enable = enable
        self._state = state
        self._siblings: list[JoinContext] = []  # contexts of the entering thread

    def __enter__(self) -> None:
        if not self._enable:
            return
        if _open_contexts.items:
            raise RuntimeError(
                "a join context is open already: for several wrappers, use "
                "torch.distributed.algorithms.Join([first, second])"
            )
        self._session.adopt()
        if self._session.reducer is None:
            return
        self._siblings = _open_contexts.items
        self._siblings.append(self)
        self._process = os.getpid()
        self._outer = self._wrapper._join_config  # of a torch Join that still lives
        Joinable.__init__(self._wrapper)  # resets it: in no such context
        if self._state.raises:
            # Make each forward ask the others: see `notify_join`.
            self._wrapper._join_config = self._outer._replace(enable=True)
        self._session.enter_join(dataclasses.replace(self._state))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self not in self._siblings:
            return
        self._siblings.remove(self)
        if os.getpid() != self._process:
            return  # a forked child is not a rank
        try:
            if error is None:
                self._take_shadow_steps()
            else:
                self._tell_peers(error)
        except BaseException as problem:
            if error is None:
                self._tell_peers(problem)
            raise
        finally:
            self._wrapper._join_config = self._outer
            self._session.set_join(JoinState())

    def _tell_peers(self, error: BaseException) -> None:
        if not self._session.join.has_ended_early:
            _abandon(self._session, error)  # otherwise each raises on its own

    def _take_shadow_steps(self) -> None:
        session = self._session
        session.adopt()  # the last step may have failed
        reducer = session.reducer
        if reducer is None:
            return  # wrapping anew has failed, and was reported
        if session.join.raises and _count_ranks_that_go_on(session, False) > 0:
            session.join.has_ended_early = True
            raise RuntimeError(f"Rank {session.world.rank} exhausted all inputs.")
        n_active, last = reducer.shadow_step(True, False)
        while n_active > 0:
            n_active, last = reducer.shadow_step(False, False)
        _take_model_of(self._wrapper, session, last)


class ShadowSteps(JoinHook):
    """The hook that torch's ``Join`` runs on a rank that ran out of batches.

    It lives as long as the ``Join``.  So its end shows what torch does not report:
    forwards are no longer counted, or an exception ended the context.
    """

    def __init__(self, wrapper: Any, session: Session) -> None:
        self._wrapper = wrapper
        self._session = session
        self._number = session.n_join_hooks
        self._process = os.getpid()

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        session = self._session
        n_synchronised, work = _begin_count(self._wrapper, False)
        if work is not None:
            work.wait()
        if n_synchronised.item() > 0 and session.reducer is not None:
            session.adopt()
            session.reducer.shadow_step(False, True)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of the last rank, once all have joined."""
        session = self._session
        if session.reducer is not None:
            session.adopt()
            _, last = session.reducer.shadow_step(is_last_joiner, False)
            _take_model_of(self._wrapper, session, last)
        session.join.is_active = False

    def __del__(self) -> None:
        session = self._session
        if session.n_join_hooks != self._number or os.getpid() != self._process:
            return  # the wrapper is in a newer context, or its parent's
        Joinable.__init__(self._wrapper)
        if session.join.is_active:
            session.join.is_active = False
            with contextlib.suppress(Exception):
                _abandon(session, None)
