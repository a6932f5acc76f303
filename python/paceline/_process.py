"""The process engine, the caller's side: replicas 1 and up are worker processes.

A forward is posted to the workers, runs here on the first part of the batch, and takes
their answers; ``_graph.py`` shows how their part comes into autograd's graph.  What has
changed in the module since the last forward is told with the next (*news*).
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from paceline import (
    _draws,
    _imports,
    _native,
    _pool,
    _protocol,
    _remote,
    _shared,
    _strays,
    _torch,
    _torch_graph,
    _travel,
    _worker,
)
from paceline._devices import CPU
from paceline._errors import as_of_replica
from paceline._graph import Call, Collect, Given, Gradients, Launch, Tail
from paceline._intra_op import IntraOp
from paceline._threads import inside
from paceline._told import Told

if TYPE_CHECKING:
    from paceline._dp import DataParallel
    from paceline._higher import Recording

Part = tuple[_native.Tree, list[Any]]
Answer = tuple[_native.Tree, list[Any], bytes]
Reply = tuple[bytes, list[Any], bytes]


class ProcessEngine:
    """Replicas in worker processes.

    Parameters
    ----------
    owner : paceline.DataParallel
        The wrapper.

    Raises
    ------
    CannotTravelError
        If the model cannot be run in other processes.
    """

    name = "process"

    def __init__(self, owner: DataParallel) -> None:
        _protocol.Modes.now()  # raises where this call is for threads
        self.n_replicas = len(owner.device_ids)
        self._n_remote = self.n_replicas - 1
        self._lock, self._lock_pid = threading.RLock(), os.getpid()
        self._awaited: Call | None = None  # whose backward the replicas run
        self._tail_strays: _strays.Strays = []
        self._tail: tuple[bytes, ...] = ()
        self._has_queued_tail = False
        self._n_calls = 0
        self._thread = threading.get_ident()
        self._is_shared = False  # by threads
        self.dropped: list[int] = []
        self.foretold: dict[Any, Any] = {}  # see Recording.expect
        with torch.inference_mode(False), torch.enable_grad():
            self.token = torch.empty((), requires_grad=True)
            self._token_node = torch.autograd.graph.get_gradient_edge(self.token).node
        self._bare = _native.flatten(self.token.detach())[0]
        self._model = self._share(owner.module, True)
        self._generators = _draws.OtherGenerators()
        self._is_stale = False
        self._told = Told(self._n_remote)
        self._hire()

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held by who uses the channels; in a forked child one of its own."""
        if self._pid != os.getpid() and self._lock_pid != os.getpid():
            self._lock, self._lock_pid = threading.RLock(), os.getpid()
        return self._lock

    def _hire(self) -> None:
        """Start workers; they import torch while this process goes on."""
        self._pid = os.getpid()
        self._is_sound = True
        self._is_told = False
        self._is_cut = False  # a forward has begun, and not come to its end
        self._crew, self._is_ready = _pool.hire(self._n_remote)
        self._channels = self._crew.channels
        self._threads = IntraOp(self._crew.shares[0].n_threads)

    def _dismiss(self) -> None:
        self.forget_tail()
        self._threads.give_back()
        _pool.release(self._crew, self._pid, self._is_sound and self._is_ready)

    def _note_thread(self) -> None:
        """See whether several threads use this engine: `.grad` is autograd's then."""
        if threading.get_ident() != self._thread:
            self._is_shared = True

    def _ensure_crew(self) -> None:
        """Start workers anew where one has died, or this process is a forked child."""
        if not self._is_sound or self._pid != os.getpid():
            self._dismiss()
            self._hire()
            self._is_stale = True  # the last ones have heard all that has changed
        if not self._is_ready:
            self._crew.wait_until_ready()
            self._is_ready = True

    # ---- the model -------------------------------------------------------------------

    def _share(self, module: torch.nn.Module, is_first: bool) -> _shared.SharedModel:
        made = frozenset[int]() if is_first else self._model.made()
        with torch.inference_mode(False), torch.no_grad():
            return _shared.SharedModel(module, self._n_remote, is_first, made)

    def _tell_model(self) -> None:
        """Have every replica build its module, side by side."""
        for k, channel in enumerate(self._channels):
            words = _travel.dumps(self._model.describe(k), {})
            channel.post(_protocol.MODEL, words, [])
        try:
            self._take_answers(self._n_remote, True)
        except _native.PeerError:
            raise
        except Exception as error:
            raise _travel.CannotTravelError(
                f"a worker process cannot build it: {type(error).__name__}: {error}"
            ) from error
        self._told.forget()
        self._tell_code()
        self._is_told = True

    def _tell_code(self) -> None:
        """Have replicas that have imported other code than this process take its."""
        told = self._model.code.told()
        if not any(told):
            return
        words = pickle.dumps(told)
        for channel in self._channels:
            channel.post(_protocol.CODE, words, [])
        answers = self._take_answers(self._n_remote, True)
        for k, (answer, _, _) in enumerate(answers):
            entries, operators = pickle.loads(answer)
            if operators:
                raise _travel.CannotTravelError(
                    f"the operator {operators[0]} is defined in this process alone"
                )
            if entries:
                words = _imports.corrections(entries, self._model.homes)
                self._told.add({"code": words}, [k])

    def _gather_news(self, module: torch.nn.Module) -> None:
        """Note what the replicas have to hear before their next forward."""
        modes = _protocol.Modes.now()  # first: it may refuse this call
        changes = None
        if self._model.module is module and not self._is_stale:
            changes = self._model.changes()
        if changes is None:
            self.forget_tail()
            self._model = self._share(module, self._model.module is not module)
            self._is_told = self._is_stale = False
        if not self._is_told:
            self._tell_model()
        news: dict[str, Any] = changes or {}
        if modes != self._told.modes:
            news["modes"] = self._told.modes = modes
        if self.dropped:
            news["dropped"], self.dropped = self.dropped, []
        if news:
            self._told.add(news, range(self._n_remote))

    # ---- forward ---------------------------------------------------------------------

    def run(self, owner: DataParallel, scattered: _native.Scattered) -> list[Any]:
        """Return the outputs of the replicas, in order."""
        remote = range(1, len(scattered.sizes))
        args, kwargs = scattered.chunk(0)
        parts = [(scattered.tree, scattered.leaves(k)) for k in remote]
        return self._run(owner, args, kwargs, parts)

    def run_lists(
        self, owner: DataParallel, inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of the replicas, each given its arguments."""
        given = [
            (tuple(args) if isinstance(args, (list, tuple)) else (args,), named)
            for args, named in zip(inputs, kwargs, strict=True)
        ]
        parts = [_native.flatten(one) for one in given[1:]]
        return self._run(owner, *given[0], parts)

    def _run(
        self, owner: DataParallel, args: Any, kwargs: Any, parts: list[Part]
    ) -> list[Any]:
        if not parts:
            before = self._model.results()
            output = self._run_own(owner.module, args, kwargs)
            self._model.forward_ends_alone(before)
            return [output]
        for _, leaves in parts:
            _travel.check_plain(leaves)
        if _torch_graph.is_forward_mode():
            raise _travel.ThisCallError("forward-mode differentiation is on")
        self._note_thread()
        self._ensure_crew()
        self._drain()
        if self._is_cut:
            self._told.doubt(range(self._n_remote))
        self._is_cut = True
        call = self.new_call()
        is_grad = torch.is_grad_enabled()
        answers: list[Answer] | None = None
        try:
            self._gather_news(owner.module)
            if is_grad:
                call.slots = self._model.trained
                is_grad = bool(call.slots or self._inputs_that_grow(call, parts))
            hooked = self._model.hooked() if is_grad else None
            self._post_forward(call, parts, is_grad, hooked is not None)
        except _travel.ThisCallError:
            raise
        except BaseException:
            self._is_stale = True  # some have heard the news, and some have not
            raise
        if hooked is not None:
            # A hook must not be called for what no replica uses: ask before `Collect`.
            answers = self._take_forward(len(parts), True, self._model.n_slots)
            call.slots = [i for i in call.slots if not hooked[i] or self._is_used[i]]
        if is_grad:
            inputs = self._inputs_that_grow(call, parts)
            handle = Collect.apply(  # type: ignore[no-untyped-call]
                call, self.token, *inputs, *self._model.parameters_of(call.slots)
            )
        output = self._run_own(owner.module, args, kwargs)
        if answers is None:
            copies = "gather" in owner._overridden
            answers = self._take_forward(len(parts), copies, 0)
        call.is_held = False
        if is_grad:
            self._launch_begins(call, handle, answers)
        if len(parts) == self._n_remote:  # else some have not done what it did
            self._model.forward_ends()
        else:
            self._model.forward_ends_alone()
        self._is_cut = False
        return [output] + [tree.unflatten(leaves) for tree, leaves, _ in answers]

    def _run_own(self, module: Any, args: Any, kwargs: Any) -> Any:
        try:
            with inside():
                output = module(*args, **kwargs)
            self._generators.note(module.training)
            return output
        except Exception as error:
            raise as_of_replica(error, 0, CPU) from error

    @staticmethod
    def _inputs_that_grow(call: Call, parts: list[Part]) -> list[torch.Tensor]:
        """Return the inputs of replicas that want a gradient."""
        wanting = [
            [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            for _, leaves in parts
        ]
        call.n_inputs = [len(some) for some in wanting]
        return [x for some in wanting for x in some]

    def _post_forward(
        self, call: Call, parts: list[Part], is_grad: bool, asks_used: bool
    ) -> None:
        bits = _protocol.TRACKED if is_grad else 0
        if torch.is_grad_enabled():
            bits |= _protocol.GRAD
        if asks_used:
            bits |= _protocol.TELL_USED
        if torch.is_inference_mode_enabled():
            bits |= _protocol.INFERENCE
        seed = _native.fingerprint(torch.default_generator.get_state())
        salt = self._generators.salt(self._model.module.training)
        call.is_held = is_grad
        for k, (tree, leaves) in enumerate(parts):
            told = self._told.words_for(k, tree)
            flags = bits | (_protocol.NEWS if told else 0)
            if self._told.trees[k] is None:
                flags |= _protocol.TELL_TREE
            words = _protocol.FORWARD_WORDS.pack(
                call.number, (seed + k) & _protocol.MOST_SEED, salt + k, flags
            )
            if told:
                words += _travel.dumps(told, {}, homes=self._model.homes)
            self._channels[k].post(_protocol.FORWARD, words, leaves)
            self._told.is_posted(k)

    def _take_forward(self, n: int, copies: bool, n_mask: int) -> list[Answer]:
        """Return each replica's output.

        Where `copies` is False, bare tensors are views, which the next request
        overwrites: they are to be concatenated at once.  The first `n_mask` bytes of
        the answers tell which slots are used.
        """
        copies = copies or any(tree is not self._bare for tree in self._told.trees[:n])
        answers = []
        self._is_used = [False] * n_mask
        for k, (words, leaves, flags) in enumerate(self._take_answers(n, copies)):
            if n_mask:
                self._is_used = [
                    a or bool(b) for a, b in zip(self._is_used, words, strict=False)
                ]
            tree = self._told.trees[k]
            if len(words) > n_mask:
                tree = pickle.loads(words[n_mask:])
                if tree == self._bare:
                    tree = self._bare
                elif not copies:
                    leaves = [_copy_of(leaf) for leaf in leaves]
                self._told.trees[k] = tree
            assert tree is not None
            answers.append((tree, leaves, flags))
            self._told.is_heard(k)
        return answers

    def _launch_begins(
        self, call: Call, handle: torch.Tensor, answers: list[Answer]
    ) -> None:
        """Make the answers' outputs what `Launch` returns, where they need it."""
        places: list[tuple[int, int]] = []
        for k, (_, leaves, flags) in enumerate(answers):
            wanting = [i for i, flag in enumerate(flags) if flag]
            call.places.append(range(len(places), len(places) + len(wanting)))
            call.outputs += [leaves[i] for i in wanting]
            places += [(k, i) for i in wanting]
        if not places:
            return
        call.is_held = True
        outputs = Launch.apply(call, handle)  # type: ignore[no-untyped-call]
        for (k, i), output in zip(places, outputs, strict=True):
            answers[k][1][i] = output

    # ---- backward --------------------------------------------------------------------

    def new_call(self) -> Call:
        """Return a call with a number of its own."""
        with self.lock:
            self._n_calls += 1
            return Call(self, self._n_calls)

    def launch(
        self, call: Call, gradients: Given, recording: Recording | None, may_tail: bool
    ) -> None:
        """Post the gradients of a call's outputs to its replicas."""
        with self.lock:
            self._note_thread()
            self._drain()
            bits = _protocol.KEEP_GRAPH if call.is_held else 0
            is_tailed = None if may_tail and recording is None else False
            if self._tail:  # of another call in this same backward
                is_tailed = is_tailed is None and self._may_tail(call)
                if not is_tailed:
                    self.add_tail()
            else:
                self._has_queued_tail = False
            for k, places in enumerate(call.places):
                adds = _protocol.ACCUMULATE if k < len(self._tail) else 0
                words = _protocol.BACKWARD_WORDS.pack(call.number, bits | adds)
                if recording is not None:
                    words = recording.words(k, call.number, bits)
                part = [gradients[i] for i in places]
                self._channels[k].post(_protocol.BACKWARD, words, part)
            # The replicas are at work: now there is time to look.
            if is_tailed is None:
                is_tailed = self._may_tail(call)
            if is_tailed and not self._has_queued_tail:
                _torch.at_end_of_backward(Tail(self))
                self._has_queued_tail = True  # not before: Ctrl-C may come between
            call.gradients = None
            call.recording = recording
            call.is_tailed = is_tailed
            self._awaited = call

    def _may_tail(self, call: Call) -> bool:
        """Tell whether nothing sees how the parameters' gradients come together."""
        slots = self._model.slots
        return (
            slots is not None
            and _torch.accumulates(self._token_node)
            and slots.hooked() is None
            and not call.is_in_ddp
            and not self._is_shared
            and not _torch.is_compiled_autograd()
        )

    def settle(self) -> None:
        """Wait for the backward that the replicas run, and keep what they answer."""
        with self.lock:
            self._settle()

    def _settle(self) -> None:
        if self._awaited is None:
            return
        call, self._awaited = self._awaited, None
        try:
            answers = self._take_answers(len(call.places), True)
        except _native.PeerError:
            raise
        except Exception as error:
            if call.is_tailed:
                raise
            call.error = error.with_traceback(None)  # its frames hold the call
            return
        if call.recording is not None:
            answers = call.recording.read(answers)
        n_slots = self._model.n_slots
        masks = tuple(words[:n_slots] for words, _, _ in answers)
        gradients = Gradients()
        for (words, parts, _), n in zip(answers, call.n_inputs, strict=True):
            gradients.of_inputs += parts[:n] or [None] * n
            gradients.strays += _strays.unpack(words[n_slots:], parts[n:])
        if call.is_tailed:
            self._tail = masks + self._tail[len(masks) :]
            self._tail_strays += gradients.strays
        elif self._model.slots is not None:
            gradients.of_slots = self._model.take(masks, call.slots, gradients.strays)
        call.gradients = gradients

    def _drain(self) -> None:
        """Wait until every replica is idle: the next request finds it listening."""
        self._settle()
        for channel in self._channels:
            if channel.is_busy:  # whoever posted that has failed before the answer
                channel.wait(copy=False)
                self._told.doubt(range(self._n_remote))

    def add_tail(self) -> None:
        """Add what the replicas have left to the parameters' gradients."""
        with self.lock:
            self._has_queued_tail = False
            self._settle()
            tail, self._tail = self._tail, ()
            strays, self._tail_strays = self._tail_strays, []
            if tail and self._model.slots is not None:
                self._model.slots.add(tail)
            for slot, stray in strays:
                self._model.add_stray(slot, stray)

    def forget_tail(self) -> None:
        """Forget gradients of a backward that failed, and those on their way."""
        self._awaited, self._tail, self._tail_strays = None, (), []
        self._has_queued_tail = False

    @property
    def n_slots(self) -> int:
        """How many parameters the replicas leave gradients of."""
        return self._model.n_slots

    # ---- answers, and the end --------------------------------------------------------

    def _take_answers(self, n: int, copies: bool) -> list[Reply]:
        """Wait for the first `n` replicas; raise the lowest one's error, if any."""
        answers = []
        errors: list[Exception] = []
        for k, channel in enumerate(self._channels[:n], start=1):
            try:
                kind, words, parts, flags = channel.wait(copy=copies)
            except _native.PeerError as error:
                self._is_sound = False
                errors.append(error)
                continue
            if kind == _worker.KIND_ERROR:
                errors.append(_remote.error_of(words, k, CPU))
            answers.append((words, parts, flags))
        if errors:
            self._told.doubt(range(n))
            raise errors[0]
        return answers

    def close(self) -> None:
        """Let the workers go; the parameters stay where they are."""
        with self.lock:
            self._dismiss()


def _copy_of(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
