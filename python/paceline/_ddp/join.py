"""Uneven numbers of batches: ranks that have run out take shadow steps for the rest.

Inside ``model.join()`` the ranks that still train take their ordinary steps and nothing
more.  A rank that leaves the context takes *shadow steps*: one after another with zeros
(csrc/python/ddp/uneven_inputs.c), until a step shows that no rank had gradients; then
all take over the model of the rank that came last.  So all goes through shared memory,
no forward communicates, and a rank that fails is noticed by every other.

torch's own ``Join([...])``, which knows several models and sharded optimizers, counts
forwards over the process group instead, and calls what ``join_hook()`` returns.
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
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from paceline._compat import torch_core, torch_groups
from paceline._ddp.model_spec import Model, copy_model
from paceline._ddp.session import JoinState, Session, ThreadList


class Joins(TorchDDP):
    """The methods of a wrapper for uneven numbers of batches."""

    _session: Session

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> JoinContext:
        """Return a context in which ranks may take different numbers of steps.

        A rank that leaves it waits for the others, and takes part in their steps with
        zeros; its own ``.grad`` are left alone.  At its end every rank has the
        parameters, and with ``broadcast_buffers`` the buffers, of the rank that left it
        last (of several, the highest).

        Parameters
        ----------
        divide_by_initial_world_size : bool, default True
            Whether gradients are divided by the number of all ranks, or by that of the
            ranks that still train.
        enable : bool, default True
            Without it, the context does nothing.
        throw_on_early_termination : bool, default False
            Whether to raise on every rank once one has run out of batches.

        Returns
        -------
        context manager

        Raises
        ------
        RuntimeError
            With ``throw_on_early_termination``: on a rank that has run out, at the end
            of the context; on the others, out of the forward that it has missed, before
            the module is run.
        paceline.PeerError
            If another rank dies in the context, or leaves it by an exception: within a
            second, wherever this rank waits for it.

        Notes
        -----
        The contract is that of `torch's method
        <https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html>`_.
        Where it differs:

        - What counts is synchronised backwards, not forwards: several forwards before a
          backward, evaluation, and ``no_sync()`` in any form may be in the context.
          Only with ``throw_on_early_termination`` does each forward that records
          gradients ask all ranks, so that a module may have collectives of its own.
        - Rank 0's buffers are sent until it has run out, then those of the lowest rank
          that still trains (torch: of the highest); in the step in which the sender
          changes, ranks keep their own.
        - ``divide_by_initial_world_size=False`` scales the averages over all ranks by
          ``n_ranks / n_active``, in float64 and rounded once more.  That is exact where
          the ratio is a power of two; with float32 on 2, 4, 8... ranks it gives the sum
          divided by ``n_active``, rounded once.
        - An exception in the context ends it on all ranks; all may catch it and go on.

        Contexts of several wrappers are not nested: give all of them to torch's
        ``Join([...])``.  The model must not be changed in the context after a rank has
        run out.

        In ``Join([...])`` of torch this class is a joinable, with torch's limits: it
        counts forwards (those that record gradients), so each needs one backward, and
        ``no_sync()`` must be around both.  A rank that has run out gets the averages as
        its ``.grad`` there, so that a sharded optimizer in the list steps by them;
        torch's class leaves it to step by old ones.  A rank that has run out waits in
        the process group, so it learns of an exception elsewhere when the group does.

        Examples
        --------
        >>> import torch, torch.distributed as dist
        >>> from paceline import DistributedDataParallel
        >>> dist.init_process_group(
        ...     "gloo", store=dist.HashStore(), rank=0, world_size=1
        ... )
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> batches_of_this_rank = torch.ones(3, 4, 2)
        >>> with model.join():
        ...     for batch in batches_of_this_rank:
        ...         model.zero_grad()
        ...         model(batch).mean().backward()
        >>> model.module.weight.grad
        tensor([[1., 1.]])
        >>> dist.destroy_process_group()
        """
        state = JoinState(
            divides_by_active=not divide_by_initial_world_size,
            raises=throw_on_early_termination,
            is_active=True,
        )
        return JoinContext(self, enable, state)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what ``torch.distributed.algorithms.Join`` calls on a joined rank.

        Parameters
        ----------
        **kwargs
            ``divide_by_initial_world_size``, as for :meth:`join`; others are for other
            joinables.

        Returns
        -------
        torch.distributed.algorithms.JoinHook
        """
        _adopt_changes(self._session)
        divides_by_active = not kwargs.get("divide_by_initial_world_size", True)
        self._session.log.record_join()
        _set_state(self._session, JoinState(divides_by_active))
        self._session.n_join_hooks += 1
        return ShadowSteps(self, self._session.n_join_hooks)


def _adopt_changes(session: Session) -> None:
    """Do at once what the next forward would, which some ranks may not have."""
    if session.reducer is None or (session.has_changed() and not session.has_no_part()):
        session.adopt_changes()


def _set_state(session: Session, state: JoinState) -> None:
    session.join = state
    if session.reducer is not None:
        session.reducer.set_join(state.divides_by_active, state.raises)


def notify_join(wrapper: Any) -> None:
    """Tell joined ranks of a forward, and whether its backward is synchronised."""
    if torch_core.is_in_backward():
        return  # a checkpoint's recomputation
    session: Session = wrapper._session
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
    """Ask every rank whether it has another batch; each forward does, and the end.

    It goes by shared memory and not by the process group: a rank that fails is noticed
    at once.
    """
    n_ranks = 0
    for rank in range(session.world.world_size):
        answer = torch.tensor([float(goes_on)], device="cpu")
        session.world.broadcast([answer], rank)
        n_ranks += int(answer.item())
    return n_ranks


def _begin_count(wrapper: Any, is_synchronised: bool) -> tuple[torch.Tensor, Any]:
    """Begin to count the ranks whose backward is synchronised: as torch's class."""
    is_on_gpus = torch_groups.is_device_bound(wrapper.process_group)
    device = wrapper.device if is_on_gpus else "cpu"
    count = torch.tensor([float(is_synchronised)], device=device)
    return count, dist.all_reduce(count, group=wrapper.process_group, async_op=True)


def _take_model_of(wrapper: Joins, rank: int) -> None:
    """Take over the parameters, and the buffers, of the rank that ran out last."""
    session, model = wrapper._session, Model.of(wrapper.module)
    tensors = model.tensors(session.options.sync_buffers)
    copy_model(session.world, session.options.group, tensors, rank)
    wrapper._authoritative_rank = rank  # torch's name for it


def _abandon(session: Session, error: BaseException | None) -> None:
    """Tell the peers that this rank leaves a join context before its end."""
    if session.reducer is not None:
        text = "".join(traceback.format_exception(error)) if error else ""
        session.reducer.abandon(text or "it left a join context by an exception")


_open_contexts = ThreadList()  # one a thread at the most


class JoinContext:
    """What :meth:`Joins.join` returns."""

    def __init__(self, wrapper: Joins, enable: bool, state: JoinState) -> None:
        self._wrapper = wrapper
        self._session = wrapper._session
        self._enable = enable
        self._state = state
        self._siblings: list[JoinContext] = []  # those of the thread that has entered

    def __enter__(self) -> None:
        if not self._enable:
            return
        if _open_contexts.items:
            raise RuntimeError(
                "a join context is open already: for several wrappers, use "
                "torch.distributed.algorithms.Join([first, second])"
            )
        _adopt_changes(self._session)
        if self._session.reducer is None:
            return
        self._siblings = _open_contexts.items
        self._siblings.append(self)
        self._process = os.getpid()
        self._outer = self._wrapper._join_config  # of a Join of torch that is kept
        Joinable.__init__(self._wrapper)  # nothing but: no such context
        if self._state.raises:
            # Each forward is to ask the others: see `notify_join`.
            self._wrapper._join_config = self._outer._replace(enable=True)
        self._session.log.record_join()
        _set_state(self._session, dataclasses.replace(self._state))

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
            return  # a child leaves by an exception of its own
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
            _set_state(self._session, JoinState())

    def _tell_peers(self, error: BaseException) -> None:
        if not self._session.join.has_ended_early:
            _abandon(self._session, error)  # otherwise each raises of itself, as asked

    def _take_shadow_steps(self) -> None:
        session, reducer = self._session, self._session.reducer
        if reducer is None:
            return  # wrapping anew has failed, and was reported
        if session.join.raises and _count_ranks_that_go_on(session, False) > 0:
            session.join.has_ended_early = True
            raise RuntimeError(f"Rank {session.world.rank} exhausted all inputs.")
        n_active, last = reducer.shadow_step(True, False)
        while n_active > 0:
            n_active, last = reducer.shadow_step(False, False)
        _take_model_of(self._wrapper, last)


class ShadowSteps(JoinHook):
    """What torch's ``Join`` calls on a rank that has run out of batches.

    It lives as long as the ``Join``, so its end shows what torch does not say: forwards
    are no longer counted, or an exception has ended the context.
    """

    def __init__(self, wrapper: Joins, number: int) -> None:
        self._wrapper = wrapper
        self._number = number
        self._process = os.getpid()

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        reducer = self._wrapper._session.reducer
        n_synchronised, work = _begin_count(self._wrapper, False)
        if work is not None:
            work.wait()
        if n_synchronised.item() > 0 and reducer is not None:
            reducer.shadow_step(False, True)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of the last rank, once all have joined.

        Parameters
        ----------
        is_last_joiner : bool
            Whether no rank was left when this one ran out.
        """
        session = self._wrapper._session
        if session.reducer is not None:
            _, last = session.reducer.shadow_step(is_last_joiner, False)
            _take_model_of(self._wrapper, last)
        session.join.is_active = False

    def __del__(self) -> None:
        session = self._wrapper._session
        if session.n_join_hooks != self._number or os.getpid() != self._process:
            return  # the wrapper is in a newer context, or its parent's
        Joinable.__init__(self._wrapper)
        if session.join.is_active:
            session.join.is_active = False
            with contextlib.suppress(Exception):
                _abandon(session, None)
