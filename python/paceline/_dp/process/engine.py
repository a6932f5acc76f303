"""The process engine, the caller's side: replicas 1 and up are worker processes.

::

    ProcessEngine     a forward: posted to the workers, run here on the first part of
                      the batch, and joined by their answers
      Backward        the same of a backward; ``autograd.py`` has its nodes
      ModelSync       what the workers have of the model, and receive of its changes
        ReplicaWorkers  the processes

The first forward of each mode is a trial: the workers run before this process does, so
that a model which cannot run there, or writes its parameters, is found out before
anything of the caller's has changed.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline import _native
from paceline._compat import torch_graph
from paceline._dp.process import messages, pickling
from paceline._dp.process.autograd import Receive, RemoteGraph, Send
from paceline._dp.process.backward import Backward
from paceline._dp.process.model_sync import ModelSync
from paceline._dp.process.payoff import Payoff
from paceline._errors import as_of_replica
from paceline._replicas import rng
from paceline._replicas.devices import CPU
from paceline._replicas.errors import (
    ReplicaFailedError,
    UnsupportedCallError,
    WrittenError,
)
from paceline._replicas.nesting import InsideReplica
from paceline._workers import log_records

if TYPE_CHECKING:
    from paceline._replicas.call import ReplicaCall

Part = tuple[_native.Tree, list[Any]]
Answer = tuple[_native.Tree, list[Any], bytes]

NOT_RUN: Any = object()
"""The output of replica 0 where its forward was not run."""


class Forward(NamedTuple):
    """A forward that the workers are about to run."""

    graph: RemoteGraph
    parts: list[Part]
    is_tracked: bool
    hooked: bytes | None
    mode: tuple[bool, bool]
    is_trial: bool


@dataclass
class LastForward:
    """What a forward was given, to be run again here; and the output of replica 0."""

    parts: list[Part]
    seed: int
    output: Any = NOT_RUN


class ProcessEngine:
    """Replicas in worker processes; replica 0 is the module itself, in this process.

    `obstacle` says why the next forward cannot be run in processes, if that came out in
    the last.
    """

    name = "process"

    def __init__(self, module: torch.nn.Module, n_replicas: int) -> None:
        messages.Modes.now()  # raises where this call is for threads
        self.n_replicas = n_replicas
        self.obstacle: str | None = None
        self._sync = ModelSync(module, n_replicas - 1)
        self._workers = self._sync.workers
        self._backward = Backward(self._sync)
        self._bare = _native.flatten(torch.empty(()))[0]  # the tree of a tensor alone
        self._last: LastForward | None = None
        self._generators = rng.OtherGenerators()
        self._payoff: Payoff | None = Payoff(n_replicas)  # until it is over

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held by who uses the channels."""
        return self._workers.lock

    # ---- a forward -------------------------------------------------------------------

    def run(self, call: ReplicaCall, scattered: _native.Scattered) -> list[Any]:
        """Return the outputs of the replicas, in order."""
        remote = range(1, len(scattered.sizes))
        args, kwargs = scattered.chunk(0)
        parts = [(scattered.tree, scattered.leaves(k)) for k in remote]
        payoff = self._payoff
        if payoff is None or len(parts) < self._workers.n:
            return self._run(call, args, kwargs, parts)
        with payoff.call():
            outputs = self._run(call, args, kwargs, parts)
        if payoff.is_over:
            self._payoff = None
        return outputs

    def run_lists(
        self, call: ReplicaCall, inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of the replicas, each given its arguments."""
        arguments = [
            (tuple(args) if isinstance(args, (list, tuple)) else (args,), named)
            for args, named in zip(inputs, kwargs, strict=True)
        ]
        parts = [_native.flatten(each) for each in arguments[1:]]
        return self._run(call, *arguments[0], parts)

    def _run(
        self, call: ReplicaCall, args: Any, kwargs: Any, parts: list[Part]
    ) -> list[Any]:
        self._workers.steps = call.steps
        if not parts:
            before = self._sync.model.state.differing_attributes()
            output = self._run_replica_0(call.module, args, kwargs)
            self._sync.model.state.forward_ends_alone(before)
            return [output]
        forward = self._begin(call.module, parts)
        graph = forward.graph
        answers: list[Answer] | None = None
        records: log_records.Records = []  # replica 0's come first
        if forward.hooked is not None or forward.is_trial:
            # A hook must not be called for what no replica uses: ask before `Send`.
            answers = self._take_before(call, args, kwargs, forward, records)
        if forward.is_tracked:
            inputs = graph.inputs_of(parts)
            parameters = self._sync.model.gradients.parameters
            handle = Send.apply(  # type: ignore[no-untyped-call]
                graph,
                self._backward.token,
                *inputs,
                *[parameters[i] for i in graph.slots],
            )
        self._sync.model.forward_begins()
        assert self._last is not None
        if self._payoff is not None:
            self._payoff.replica_0_begins()
        output = self._last.output = self._run_replica_0(call.module, args, kwargs)
        if self._payoff is not None:
            self._payoff.replica_0_ends()
        log_records.handle(records)
        try:
            if answers is None:
                answers = self._take(forward, call.keeps_outputs)
            self._sync.model.check_unwritten()
        except (ReplicaFailedError, WrittenError) as failure:
            error = getattr(failure, "error", failure)
            if isinstance(error, WrittenError):
                self.obstacle = str(error)
                raise error from None
            raise
        graph.is_held = False
        if forward.is_tracked:
            _receive(graph, handle, answers)
        self._end(forward)
        return [output] + [tree.unflatten(leaves) for tree, leaves, _ in answers]

    def _begin(self, module: Any, parts: list[Part]) -> Forward:
        """Have the workers begin their part."""
        for _, leaves in parts:
            pickling.check_plain(leaves)
        if torch_graph.is_forward_mode():
            raise UnsupportedCallError("forward-mode differentiation is on")
        self._backward.record_thread()
        if not self._workers.is_sound:
            self._backward.forget()  # before new ones start: that may be interrupted
        self._sync.ensure_workers()
        self._backward.wait_until_idle()
        self._workers.outbox.forward_begins()
        graph = self._backward.new_graph()
        try:
            self._sync.prepare(module)
            model = self._sync.model
            mode = bool(module.training), torch.is_grad_enabled()
            is_tracked = False
            if torch.is_grad_enabled():
                graph.slots = model.active_slots
                is_tracked = bool(graph.slots or graph.inputs_of(parts))
            hooked = model.gradients.hooked() if is_tracked else None
            is_trial = mode not in self._sync.tried
            forward = Forward(graph, parts, is_tracked, hooked, mode, is_trial)
            self._post(forward)
        except UnsupportedCallError:
            raise
        except BaseException:
            self._sync.interrupted()
            raise
        return forward

    def _post(self, forward: Forward) -> None:
        bits = messages.TRACKED if forward.is_tracked else 0
        if forward.is_trial:
            bits |= messages.TRIAL
        if torch.is_grad_enabled():
            bits |= messages.GRAD
        if forward.hooked is not None:
            bits |= messages.WANTS_USED
        if torch.is_inference_mode_enabled():
            bits |= messages.INFERENCE
        seed = rng.stream()
        salt = self._generators.salt(self._sync.model.module.training)
        self._last = LastForward(forward.parts, seed)
        forward.graph.is_held = forward.is_tracked
        outbox = self._workers.outbox
        for k, (tree, leaves) in enumerate(forward.parts):
            update = self._sync.update_for(k, tree)
            flags = bits | (messages.UPDATE if update else 0)
            if outbox.trees[k] is None:
                flags |= messages.WANTS_TREE
            header = messages.FORWARD_HEADER.pack(
                forward.graph.number, (seed + k) & rng.MOST_SEED, salt + k, flags
            )
            self._workers.channels[k].post(messages.FORWARD, header + update, leaves)
            outbox.mark_sent(k)

    def _take_before(
        self,
        call: ReplicaCall,
        args: Any,
        kwargs: Any,
        forward: Forward,
        records: log_records.Records,
    ) -> list[Answer]:
        """Return each replica's output, before replica 0 runs."""
        failed: ReplicaFailedError | None = None
        try:
            return self._take(forward, True, records)
        except ReplicaFailedError as failure:
            failed = failure
        if call.raises_own_error:  # the lowest replica's error comes first
            try:
                self._run_replica_0(call.module, args, kwargs)
            finally:
                log_records.handle(records)
        raise failed

    def _take(
        self,
        forward: Forward,
        copies: bool,
        records: log_records.Records | None = None,
    ) -> list[Answer]:
        """Return each replica's output; note which hooked slots are used.

        Where `copies` is False, bare tensors are views, which the next request
        overwrites: they are to be concatenated at once.
        """
        model, outbox = self._sync.model, self._workers.outbox
        n, hooked = len(forward.parts), forward.hooked
        n_mask = 0 if hooked is None else len(hooked)
        trees = outbox.trees
        copies = copies or trees[:n].count(self._bare) < n
        try:
            replies = self._workers.take_answers(
                n, copies, model.error_of_answer, records
            )
        except (_native.PeerError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise ReplicaFailedError(error) from error
        answers = []
        for k, (payload, leaves, flags) in enumerate(replies):
            tree = trees[k]
            if len(payload) > n_mask:
                tree = pickle.loads(payload[n_mask:])
                if tree == self._bare:
                    tree = self._bare
                elif not copies:
                    leaves = [_copy_of(leaf) for leaf in leaves]
                trees[k] = tree
            assert tree is not None
            answers.append((tree, leaves, flags))
            outbox.mark_received(k)
        if hooked is not None:
            forward.graph.slots = [
                i
                for i in forward.graph.slots
                if not hooked[i] or any(payload[i] for payload, _, _ in replies)
            ]
        return answers

    def _end(self, forward: Forward) -> None:
        """Take what replica 0's forward has done for what the others' did."""
        if len(forward.parts) == self._workers.n:
            self._sync.model.forward_ends()
        else:  # some have not done what it did
            self._sync.model.state.forward_ends_alone(set())
        self._sync.model.check_hooks()
        self._workers.outbox.forward_ends()
        self._sync.tried.add(forward.mode)

    def _run_replica_0(self, module: Any, args: Any, kwargs: Any) -> Any:
        output = _run_here(module, 0, args, kwargs)
        self._generators.record(module.training)
        return output

    def finish(self) -> None:
        """Let go of what the last forward was given, and of what was before it."""
        self._last = None
        self._sync.model.state.forget_before()

    # ---- beside, instead and after ---------------------------------------------------

    @property
    def has_run(self) -> bool:
        """Whether replica 0 has come to the end of the last forward."""
        return self._last is not None and self._last.output is not NOT_RUN

    def run_again(self) -> list[Any] | None:
        """Run the last forward's other replicas in this process, as threads would.

        Return the outputs of all; None where replica 0 was not run, and nothing of the
        caller's has changed.  Replica 0 is not run again: the others begin with what
        attributes and buffers were before it.
        """
        last = self._last
        assert last is not None
        if last.output is NOT_RUN:
            return None
        shells = self._sync.model.replicas_before(len(last.parts))
        outputs = [last.output]
        state = rng.get_state()
        try:
            for k, (shell, (tree, leaves)) in enumerate(
                zip(shells, last.parts, strict=True)
            ):
                torch.default_generator.manual_seed((last.seed + k) & rng.MOST_SEED)
                args, kwargs = tree.unflatten(leaves)
                outputs.append(_run_here(shell, k + 1, args, kwargs))
        finally:
            torch.default_generator.set_state(state)
        return outputs

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Record what a forward leaves that runs by threads, for this call alone."""
        with self.lock:
            before = self._sync.model.state.differing_attributes()
        yield
        with self.lock:
            self._sync.model.state.forward_ends_alone(before)

    def close(self) -> None:
        """Let the workers go, and the parameters have ordinary memory again."""
        with self.lock:
            self._backward.forget()
            self._sync.close()


def _run_here(module: Any, replica: int, args: Any, kwargs: Any) -> Any:
    try:
        with InsideReplica():
            return module(*args, **kwargs)
    except Exception as error:
        raise as_of_replica(error, replica, CPU) from error


def _receive(graph: RemoteGraph, handle: torch.Tensor, answers: list[Answer]) -> None:
    """Make the answers' outputs what `Receive` returns, where they need it."""
    places: list[tuple[int, int]] = []
    for k, (_, leaves, flags) in enumerate(answers):
        flagged = [i for i, flag in enumerate(flags) if flag]
        graph.places.append(range(len(places), len(places) + len(flagged)))
        graph.outputs += [leaves[i] for i in flagged]
        places += [(k, i) for i in flagged]
    if not places:
        return
    graph.is_held = True
    outputs = Receive.apply(graph, handle)  # type: ignore[no-untyped-call]
    for (k, i), output in zip(places, outputs, strict=True):
        answers[k][1][i] = output


def _copy_of(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
