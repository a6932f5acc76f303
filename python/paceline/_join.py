"""Uneven numbers of batches: ranks that have run out stand in for the rest.

Inside ``model.join()`` the ranks that still train take their ordinary steps and nothing
more.  A rank that leaves the context *stands in*: it takes step after step with zeros
(csrc/python/join.c), until a step shows that no rank had gradients; then all take over
the model of the rank that came last.  So all goes through shared memory, no forward
communicates, and a rank that fails is noticed by every other.

torch's own ``Join([...])``, which knows several models and sharded optimizers, counts
forwards over the process group instead, and calls what ``join_hook()`` returns.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from abc import abstractmethod
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from paceline import _native, _torch, _torch_groups
from paceline._checkpoint import LoadsEither
from paceline._model import (
    Model,
    copy_model,
)
from paceline._options import Options


class Joining(LoadsEither, TorchDDP):
    """What a wrapper does where ranks have different numbers of batches."""

    _options: Options
    _reducer: _native.Reducer | None
    _watch: _native.Watch
    _world: _native.World
    _is_in_join = False
    _has_ended_early = False  # some rank has run out, and all are to raise
    _join_rules = (False, False)  # divides by active ranks, raises when one joins
    _n_join_hooks = 0

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
        the process group, so it hears of an exception elsewhere when the group does.

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
        rules = (not divide_by_initial_world_size, throw_on_early_termination)
        return JoinContext(self, enable, rules)

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
        self._wrap_what_is_new()
        divides_by_active = not kwargs.get("divide_by_initial_world_size", True)
        self._set_join_rules((divides_by_active, False))
        self._n_join_hooks += 1
        self._note_join()
        return StandIn(self, self._n_join_hooks)

    @abstractmethod
    def _meet_as_copy(self) -> _native.Reducer | None: ...

    @abstractmethod
    def _has_no_part(self, reducer: _native.Reducer | None) -> bool: ...

    @abstractmethod
    def _note_join(self) -> None: ...

    @abstractmethod
    def _adopt_changes(self) -> _native.Reducer | None: ...

    def _wrap_what_is_new(self) -> None:
        """Do at once what the next forward would, which some ranks may not have."""
        if self._reducer is None:
            self._meet_as_copy()
        elif self._watch.changed() and not self._has_no_part(self._reducer):
            self._adopt_changes()

    def _forget_joins(self) -> None:
        """Leave the contexts to the wrapper of which this is a copy."""
        Joinable.__init__(self)
        self._is_in_join = False
        self._join_rules = (False, False)
        self._n_join_hooks = 0

    def _set_join_rules(self, rules: tuple[bool, bool]) -> None:
        self._join_rules = rules
        if self._reducer is not None:
            self._reducer.set_join(*rules)

    def _notify_join(self) -> None:
        """Tell torch's joined ranks of a forward, and whether its backward syncs."""
        if _torch.is_in_backward():
            return  # a checkpoint's recomputation
        if self._join_rules[1]:
            self._raise_if_one_has_run_out()
            return
        self._is_in_join = True
        Join.notify_join_context(self)
        self._share_sync(self.require_backward_grad_sync, is_waited_for=False)

    def _raise_if_one_has_run_out(self) -> None:
        if self._count_ranks_that_go_on(True) < self._world.world_size:
            self._has_ended_early = True
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all "
                "ranks."
            )

    def _count_ranks_that_go_on(self, goes_on: bool) -> int:
        """Ask every rank whether it has another batch; each forward does, and the end.

        It goes by shared memory and not by the process group: a rank that fails is
        noticed at once.
        """
        n_ranks = 0
        for rank in range(self._world.world_size):
            said = torch.tensor([float(goes_on)], device="cpu")
            self._world.broadcast([said], rank)
            n_ranks += int(said.item())
        return n_ranks

    def _share_sync(self, is_synced: bool, is_waited_for: bool) -> bool:
        """Return whether any rank's backward will be synchronised."""
        is_on_gpus = _torch_groups.is_device_bound(self.process_group)
        device = self.device if is_on_gpus else "cpu"
        n_synced = torch.tensor([float(is_synced)], device=device)
        work = dist.all_reduce(n_synced, group=self.process_group, async_op=True)
        if is_waited_for and work is not None:
            work.wait()
        return bool(is_waited_for and n_synced.item() > 0)

    def _check_all_are_active(self) -> None:
        """Raise where the model cannot be wrapped anew, as some rank does not know."""
        assert self._reducer is not None
        if self._is_in_join and self._reducer.n_active < self._world.world_size:
            raise RuntimeError(
                "the model was changed in a join context after a rank has run out of "
                "batches: change it on every rank, outside the context"
            )

    def _take_model_of(self, rank: int) -> None:
        model = Model.of(self.module)
        tensors: list[torch.Tensor] = [p for _, p in model.parameters]
        if self._options.sync_buffers:
            tensors = model.tensors()
        copy_model(self._world, tensors, rank)
        self._authoritative_rank = rank  # torch's name for it

    def _abandon(self, error: BaseException | None) -> None:
        """Tell the peers that this rank leaves a join context before its end."""
        if self._reducer is None:
            return
        words = "".join(traceback.format_exception(error)) if error else ""
        self._reducer.abandon(words or "it left a join context by an exception")


class _Opened(threading.local):
    """The contexts that are open in this thread: one at the most."""

    def __init__(self) -> None:
        self.contexts: list[JoinContext] = []


_opened = _Opened()


class JoinContext:
    """What :meth:`Joining.join` returns."""

    def __init__(
        self, wrapper: Joining, enable: bool, rules: tuple[bool, bool]
    ) -> None:
        self._wrapper = wrapper
        self._enable = enable
        self._rules = rules
        self._siblings: list[JoinContext] = []  # those of the thread that has entered

    def __enter__(self) -> None:
        if not self._enable:
            return
        if _opened.contexts:
            raise RuntimeError(
                "a join context is open already: for several wrappers, use "
                "torch.distributed.algorithms.Join([first, second])"
            )
        self._wrapper._wrap_what_is_new()
        if self._wrapper._reducer is None:
            return
        self._siblings = _opened.contexts
        self._siblings.append(self)
        self._process = os.getpid()
        self._outer = self._wrapper._join_config  # of a Join of torch that is kept
        Joinable.__init__(self._wrapper)  # nothing but: no such context
        if self._rules[1]:
            # Each forward is to ask the others: see `_notify_join`.
            self._wrapper._join_config = self._outer._replace(enable=True)
        self._wrapper._is_in_join = True
        self._wrapper._has_ended_early = False
        self._wrapper._note_join()
        self._wrapper._set_join_rules(self._rules)

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
                self._stand_in()
            else:
                self._tell_peers(error)
        except BaseException as problem:
            if error is None:
                self._tell_peers(problem)
            raise
        finally:
            self._wrapper._is_in_join = False
            self._wrapper._join_config = self._outer
            self._wrapper._set_join_rules((False, False))

    def _tell_peers(self, error: BaseException) -> None:
        if not self._wrapper._has_ended_early:
            self._wrapper._abandon(error)  # otherwise each raises of itself, as asked

    def _stand_in(self) -> None:
        reducer = self._wrapper._reducer
        if reducer is None:
            return  # wrapping anew has failed, and was reported
        if self._rules[1] and self._wrapper._count_ranks_that_go_on(False) > 0:
            self._wrapper._has_ended_early = True
            raise RuntimeError(
                f"Rank {self._wrapper._world.rank} exhausted all inputs."
            )
        n_active, last = reducer.stand_in(True, False)
        while n_active > 0:
            n_active, last = reducer.stand_in(False, False)
        self._wrapper._take_model_of(last)


class StandIn(JoinHook):
    """What torch's ``Join`` calls on a rank that has run out of batches.

    It lives as long as the ``Join``, so its end tells what torch does not: forwards are
    no longer counted, or an exception has ended the context.
    """

    def __init__(self, wrapper: Joining, number: int) -> None:
        self._wrapper = wrapper
        self._number = number
        self._process = os.getpid()

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        reducer = self._wrapper._reducer
        if self._wrapper._share_sync(False, is_waited_for=True) and reducer is not None:
            reducer.stand_in(False, True)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of the last rank, once all have joined.

        Parameters
        ----------
        is_last_joiner : bool
            Whether no rank was left when this one ran out.
        """
        reducer = self._wrapper._reducer
        if reducer is not None:
            _, last = reducer.stand_in(is_last_joiner, False)
            self._wrapper._take_model_of(last)
        self._wrapper._is_in_join = False

    def __del__(self) -> None:
        wrapper = self._wrapper
        if wrapper._n_join_hooks != self._number or os.getpid() != self._process:
            return  # the wrapper is in a newer context, or its parent's
        Joinable.__init__(wrapper)
        if wrapper._is_in_join:
            wrapper._is_in_join = False
            with contextlib.suppress(Exception):
                wrapper._abandon(None)
