"""A wrapper's session with the ranks of its group: world, reducer, model, options.

`Phase` is the table of what a forward does first.  A world ends with its first failed
step.  If the ranks cannot meet after that, the next forward tries again.
The wrapper owns its session for life; a copy of the wrapper gets a new one.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from paceline import _native, _recorder
from paceline._compat import torch_core
from paceline._ddp import mixed_precision, placement, strict
from paceline._ddp.comm_hooks import CommHookRunner, CommHooks
from paceline._ddp.greeting import CHANGED_ALONE, Wish
from paceline._ddp.model_spec import (
    Changes,
    Model,
    copy_model,
    has_nothing_to_train,
    is_stateless_call,
)
from paceline._ddp.options import MIB, Options
from paceline._ddp.peers import Met
from paceline._ddp.rendezvous import Meeting
from paceline._ddp.step_callbacks import StepCallbacks, take_optimizers
from paceline._ddp.step_log import StepLog


class Wrapper(Protocol):
    """The part of a wrapper that a session needs."""

    module: Any
    find_unused_parameters: bool
    static_graph: bool

    def _show_model(self, model: Model) -> None: ...


class Phase(enum.Enum):
    """What the next forward that records gradients does first, in `Session.adopt`.

    A session stores one of the first four; `Session.next_phase` finds the others.
    """

    COPIED = "meets the ranks, and takes over rank 0's tensors"
    MOVED = "meets the ranks of another group"
    ALONE = "nothing, as the only rank"
    MET = "nothing, as one of several ranks"
    FAILED = "makes a new world, and goes on with the numbers of the failed"
    CHANGED = "leaves the world when all ranks do, and wraps the model anew"
    LOST = "raises, since wrapping anew has failed"
    APART = "nothing yet: nothing trains, or the call has its own parameters"


@dataclasses.dataclass
class JoinState:
    """The join context of the wrapper."""

    divides_by_active: bool = False  # divide gradients by the active ranks
    raises: bool = False  # on all ranks as soon as one has run out of batches
    is_active: bool = False  # the wrapper is in a context
    has_ended_early: bool = False  # a rank has run out, and all must raise


class ThreadList(threading.local):
    """A list for each thread."""

    def __init__(self) -> None:
        self.items: list[Any] = []


class Session:
    """The state of a DistributedDataParallel, its owner, behind torch's surface."""

    world: _native.RankWorld  # set as soon as there is a reducer
    _changes: Changes  # likewise

    def __init__(
        self, wrapper: Wrapper, options: Options, phase: Phase = Phase.MET
    ) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.options = options
        self.phase = phase
        self.model = Model([], [])
        self.reduced: list[Any] = []  # the reducer's parameters
        # None if there is nothing to average, or no rank was met yet
        self.reducer: _native.Reducer | None = None
        self.strict_check: strict.DynamicGraph | strict.StaticGraph | None = None
        self.callbacks = StepCallbacks()
        self.log = StepLog()
        self.hooks = CommHooks()
        self.join = JoinState()
        self.n_join_hooks = 0  # contexts of torch's own `Join` entered so far
        self.open_forwards = ThreadList()  # their watchers, the innermost last
        # The step that prepare_for_backward() asked to synchronise, or -1.
        self.requested_step = -1
        # Whether the last forward that recorded gradients was synchronised: then the
        # next takes over rank 0's buffers.
        self.syncs_buffers = True
        self.has_taken_optimizers = False  # of those that run in backward
        self.sync, self.in_no_sync = True, False
        self._met: Met | None = None  # for a meeting after a failed step
        self.recorder: _native.Recorder | None = None

    @property
    def wrapper(self) -> Wrapper:
        """The wrapper."""
        wrapper = self._wrapper()
        assert wrapper is not None, "only the wrapper calls this"
        return wrapper

    def set_sync(self, sync: bool, in_no_sync: bool) -> None:
        """Set whether forwards request an average, and whether all backwards are local.

        The first is torch's attribute; the second is for ``no_sync()`` around a
        backward only.
        """
        self.sync, self.in_no_sync = sync, in_no_sync
        if self.reducer is not None:
            self.reducer.sync, self.reducer.in_no_sync = sync, in_no_sync

    @property
    def sends_buffers(self) -> bool:
        """Whether buffers go with the gradients, and not through a buffer hook."""
        return self.options.sync_buffers and "buffer_hook" not in vars(self.wrapper)

    @property
    def needs_reducer(self) -> bool:
        """Whether a lone rank needs a reducer, although it has nothing to average."""
        has_callbacks = bool(self.hooks.registered or self.callbacks.always)
        return has_callbacks or self.options.strict or self.options.is_manual

    def set_join(self, state: JoinState) -> None:
        """Enter another join context, or leave it."""
        self.join = state
        if self.reducer is not None:
            self.reducer.set_join(state.divides_by_active, state.raises)

    def enter_join(self, state: JoinState) -> None:
        """Enter a join context."""
        self.log.entries["join_uneven_inputs"] = 1
        self.set_join(state)

    # ---- construction -------------------------------------------------------------

    def set_up(
        self,
        read_arguments: Callable[[Model], None] | None = None,
        error: Exception | None = None,
        copies: bool = True,
    ) -> None:
        """Compare the ranks' models, make the world, register the hooks.

        `read_arguments` checks the constructor's arguments that depend on the model;
        `error` is an error in the others, which every rank raises.  Without `copies`
        rank 0's tensors are not copied.
        """
        device_type = placement.type_of(self.wrapper.module)
        met = self._met if self.reducer is not None else None
        meeting = Meeting(self.options.group, device_type, met)
        try:
            self._set_up(meeting, read_arguments, error, copies)
            self._met = meeting.keep()
        except BaseException as problem:
            if met is not None:
                meeting.give_up(problem)
                meeting.keep()
                met.is_behind = met.is_behind or meeting.may_be_behind(problem)
            raise
        finally:
            meeting.close()

    def _set_up(
        self,
        meeting: Meeting,
        read_arguments: Callable[[Model], None] | None,
        error: Exception | None,
        copies: bool,
    ) -> None:
        failed, options = self.reducer, self.options
        has_buffers = bool(self.model.buffers)
        n_taken = 0 if failed is None else failed.n_taken
        module, sends = self.wrapper.module, self.sends_buffers
        wish = Wish(module, options, sends, has_buffers, copies, n_taken)
        model, gpu, jobs = wish.agree(meeting, read_arguments, error)
        self.model = model
        self.phase = Phase.ALONE if meeting.size == 1 else Phase.MET
        self.wrapper._show_model(model)
        reduced = mixed_precision.prepare(model, options.precision)
        self.reduced, stands_in = reduced, reduced is not model.trainable
        uses_group = meeting.uses_group and gpu is None
        if meeting.size == 1 and not uses_group and not self.needs_reducer:
            return  # the gradients of one rank are their own average
        is_by_group = uses_group and not meeting.ranks_by_host
        caps = options.caps_of(is_by_group=is_by_group, is_on_gpu=gpu is not None)
        buffers = model.buffers if self.sends_buffers else []
        places = model.places() if self.sends_buffers else []
        bytes_of = (caps.bucket_bytes, caps.last_bytes)
        view_bytes = 0 if stands_in else options.view_bytes(is_on_gpu=gpu is not None)
        native = gpu.native if gpu is not None else None
        arena_bytes, n_ops, host_bytes = _native.measure(
            reduced, places, *bytes_of, model.sparse, native, meeting.size
        )
        arena_bytes = max(arena_bytes, MIB)
        device = {}
        if gpu is not None:
            device = gpu.memory(arena_bytes, host_bytes)
            arena_bytes = host_bytes
        world, reducer = meeting.connect(arena_bytes, n_ops, **device), None
        try:
            if options.sync_at_start and copies:
                tensors = model.tensors(options.sync_buffers_at_start)
                copy_model(world, options.group, tensors)
            reducer = _native.Reducer(
                world, reduced, places, *bytes_of, view_bytes, model.sparse, caps.each
            )
            mixed_precision.release(reduced)
            reducer.binds_new = stands_in
            reducer.keeps_grads = not (options.as_bucket_views or stands_in)
            self._record(world, jobs)
            self._changes = Changes(self.wrapper, model, buffers, reducer)
            self.world = world
            self._attach(reducer)
            if failed is not None:
                reducer.follow(failed)
        except BaseException:
            if reducer is not None:
                reducer.detach()  # the error's traceback may keep it
            self.reducer = failed
            if failed is None:
                world.note_exception(traceback.format_exc())
                world.leave()
            else:  # the others may be in it: this rank meets them after its failure
                world.fail(traceback.format_exc())
                self.world = world
            raise

    def _attach(self, reducer: _native.Reducer) -> None:
        """Configure a new reducer, and attach its callbacks."""
        self.reducer = reducer
        self.set_sync(self.sync, self.in_no_sync)
        self.set_join(self.join)
        reducer.follows_forwards = True
        reducer.is_manual = self.options.is_manual
        self.log.first_buckets = reducer.buckets
        self.follow_graph()
        self.attach_comm_hook()

    def _record(self, world: _native.RankWorld, jobs: list[str]) -> None:
        """Record the steps, in a job with the identity of its rank 0.

        After a failed step the same recording goes on.
        """
        if self.reducer is not None:
            self.world.record(None)
            world.record(self.recorder)
            return
        rank, hosts = world.rank, [job.rpartition(":")[0] for job in jobs]
        self.recorder = _recorder.start(
            kind="rank",
            job=jobs[0],
            model=type(self.wrapper.module).__name__,
            rank=rank,
            world_size=len(jobs),
            local_rank=hosts[:rank].count(hosts[rank]),
            device=str(self.model.parameters[0][1].device),
        )
        world.record(self.recorder)

    def follow_graph(self) -> None:
        """Set how the reducer treats graphs, by the wrapper's flags."""
        reducer, wrapper = self.reducer, self.wrapper
        if reducer is None:
            return
        reducer.strict = self.options.strict and not wrapper.static_graph
        reducer.ends_with_step = wrapper.find_unused_parameters or wrapper.static_graph
        if self.strict_check is not None:
            self.callbacks.always.remove(self.strict_check)
            self.strict_check = None
        if self.options.strict:
            if wrapper.static_graph:
                check: Any = strict.StaticGraph(reducer, self.model.trainable, self.log)
            else:
                searches = wrapper.find_unused_parameters
                check = strict.DynamicGraph(reducer, self.model.trainable, searches)
            self.strict_check = check
            self.callbacks.always.append(check)
        self.callbacks.attach(reducer)

    def attach_comm_hook(self) -> None:
        """Connect the reducer, which is new or idle, to the hook."""
        hooks = self.hooks.registered
        if self.reducer is None:
            self.set_up_alone()  # which attaches the hook
        elif hooks:
            caps, uses_group = self.options.network_caps, self.world.uses_group
            tensors, sparse = self.reduced, self.model.sparse
            runner = CommHookRunner(
                self.reducer, tensors, sparse, self.hooks, uses_group
            )
            self.reducer.set_comm_hook(
                runner, caps.bucket_bytes, caps.last_bytes, caps.each
            )

    def take_optimizers(self) -> None:
        """Take over optimizers that parameters were given, at the first forward."""
        self.has_taken_optimizers = True
        optimizers = take_optimizers(p for _, p in self.model.parameters)
        if optimizers is None:
            return
        self.callbacks.always.append(optimizers)
        self.set_up_alone()
        self.callbacks.attach(self.reducer)

    def set_up_alone(self) -> None:
        """Make a reducer if a lone rank without one needs it now."""
        if self.reducer is None and self.phase is Phase.ALONE and self.needs_reducer:
            self.set_up()

    # ---- phases ---------------------------------------------------------------------

    def wrap_anew(self) -> None:
        """Make the next forward that records gradients build a new world."""
        if self.reducer is not None:
            self._changes.wraps_anew = True

    def move(self, group: dist.ProcessGroup) -> None:
        """Average over another group's ranks from the next such forward on."""
        self.options = dataclasses.replace(self.options, group=group)
        if self.phase is not Phase.COPIED:
            self.phase = Phase.MOVED
        self.wrap_anew()

    def next_phase(self) -> Phase:
        """Return the phase, from all that decides it."""
        phase, reducer = self.phase, self.reducer
        if reducer is not None:
            has_failed = self.sync and reducer.has_failed
            # In a backward, the forward is a checkpoint's recomputation.
            meets = has_failed and not torch_core.is_in_backward()
            if not meets and not self._changes.changed():
                return phase
            phase = Phase.FAILED if reducer.has_failed else Phase.CHANGED
        elif phase in (Phase.ALONE, Phase.MET):
            return phase if phase is Phase.ALONE else Phase.LOST
        module = self.wrapper.module
        has_nothing = reducer is not None and has_nothing_to_train(module)
        return Phase.APART if has_nothing or is_stateless_call(module) else phase

    def adopt(self, phase: Phase | None = None, has_buffers: bool = True) -> None:
        """Do what the phase demands, with all ranks, in the same forward on each.

        Without ``phase``, do now what the next forward would do, since some ranks may
        have none.  With ``has_buffers``, first take over those rank 0 has sent.

        A copy (deepcopy, unpickled) meets the ranks here, not when it is made, because
        one rank alone may make a copy, to save or to evaluate it.
        """
        phase, old = phase or self.next_phase(), self.reducer
        match phase:
            case Phase.MET | Phase.ALONE | Phase.APART:
                return
            case Phase.COPIED | Phase.MOVED:
                if not has_nothing_to_train(self.wrapper.module):
                    self.set_up(copies=phase is Phase.COPIED)
            case Phase.FAILED if old is not None and self.phase is not Phase.MOVED:
                self._follow(old, has_buffers)
            case Phase.FAILED | Phase.CHANGED if old is not None:
                self._replace(old, has_buffers)
            case Phase.LOST:
                raise RuntimeError(
                    "wrapping the model anew after a change has failed: make a new "
                    "DistributedDataParallel of wrapper.module on every rank"
                )

    def _follow(self, failed: _native.Reducer, has_buffers: bool) -> None:
        """Meet the ranks again, after a failed step, and leave its world then."""
        if has_buffers:
            failed.apply_buffers()
        failed.check_failure()
        unseen, error = set[int](), None
        try:
            unseen = self._unseen(failed)
        except RuntimeError as problem:
            error = problem  # which all ranks raise
        world, met = self.world, self._met
        if met is not None:
            met.watch(world)
        self.set_up(error=error, copies=self._changes.parameters_changed())
        # Outputs of earlier forwards may keep the reducer and its world alive.
        failed.detach()
        world.leave()
        if met is not None:
            met.is_behind = False
        self._keep_unseen(unseen)

    def _replace(self, reducer: _native.Reducer, has_buffers: bool) -> None:
        """Leave the world, and make another one, for the model as it is now.

        If only one rank has changed its model, it ends the others' step, and every rank
        raises ``MismatchError``.
        """
        reducer.forward_begins()  # raises if the last step has not ended
        if has_buffers:
            reducer.apply_buffers()
        if self.join.is_active and reducer.n_active < self.world.world_size:
            raise RuntimeError(
                "the model was changed in a join context after a rank has run out of "
                "batches: change it on every rank, outside the context"
            )
        unseen, copies = self._unseen(reducer), self._changes.parameters_changed()
        self.world.note_exception(
            "Its model was changed after wrapping. Change it on every rank, before the "
            "same forward."
        )
        if self.phase is not Phase.MOVED:  # its ranks may have left the world
            self._meet_in_old_world()
        self.phase = Phase.MET
        reducer.detach()
        self.world.leave()
        self.reducer = None
        self.set_up(copies=copies)
        self._keep_unseen(unseen)

    def _unseen(self, reducer: _native.Reducer) -> set[int]:
        """Return the ids of parameters with gradients that only this rank has.

        None of them may be frozen now: the ranks would never average it.
        """
        flags = zip(self.model.trainable, reducer.unseen, strict=True)
        unseen = {id(p) for p, is_unseen in flags if is_unseen and p.grad is not None}
        for name, p in self.wrapper.module.named_parameters():
            if id(p) in unseen and not p.requires_grad:
                message = (
                    f"parameter {name} was frozen, and its gradient holds what this "
                    "rank has accumulated in no_sync(): run a backward outside "
                    "no_sync() before the model is changed, or set .grad to None"
                )
                self.world.note_exception(message)
                raise RuntimeError(message)
        return unseen

    def _keep_unseen(self, unseen: set[int]) -> None:
        """Let the new reducer, if there is one, know the gradients of `_unseen`."""
        if self.reducer is not None:
            self.reducer.unseen = bytes(id(p) in unseen for p in self.model.trainable)

    def _meet_in_old_world(self) -> None:
        """Raise if not every rank is about to wrap its model anew.

        The others issue another operation then.  Over a process group nothing shows it.
        """
        if self.world.uses_group:
            return
        try:
            self.world.wait(self.world.issue("barrier", "float32", "sum", 0, 0))
        except _native.MismatchError as error:
            raise _native.MismatchError(f"{error}. {CHANGED_ALONE}") from error

    # ---- under strict ---------------------------------------------------------------

    def refuse_unused(self) -> None:
        """Raise as torch does, under strict, if the last step left parameters out."""
        if self.strict_check is None or self.reducer is None:
            return
        name_of = {id(p): name for name, p in self.model.parameters}
        names = [name_of[id(p)] for p in self.model.trainable]
        message = self.strict_check.refusal(names, self.world.rank)
        if message is not None:
            self.world.note_exception(message)
            self.log.note_error(f"{RuntimeError}: {message}")
            raise RuntimeError(message)
