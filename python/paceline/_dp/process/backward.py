"""The replicas' part of a backward: posted to the workers, and taken from them."""

from __future__ import annotations

import threading
from typing import Any

import torch

from paceline import _native
from paceline._compat import odd_tensors, torch_core
from paceline._dp.process import messages
from paceline._dp.process.autograd import (
    AddDeferred,
    DoubleBackward,
    Gradients,
    Grads,
    RemoteGraph,
)
from paceline._dp.process.model_sync import ModelSync


class Backward:
    """Runs the backward of remote graphs in the workers, one at a time.

    `token` always requires a gradient, and so does what `Send` makes of it; `expected`
    is described by `DoubleBackward.expect`.
    """

    def __init__(self, sync: ModelSync) -> None:
        self.sync = sync
        self.expected: dict[Any, tuple[bytes, ...]] = {}
        self._n_graphs = 0
        self._running: RemoteGraph | None = None  # whose backward the workers run
        self._is_queued = False  # that deferred gradients are added at the end
        self._thread, self._has_threads = threading.get_ident(), False
        with torch.inference_mode(False), torch.enable_grad():
            self.token = torch.empty((), requires_grad=True)
            self._token_node = torch.autograd.graph.get_gradient_edge(self.token).node

    def new_graph(self) -> RemoteGraph:
        """Return a graph with a number of its own."""
        with self.sync.workers.lock:
            self._n_graphs += 1
            return RemoteGraph(self, self._n_graphs)

    def record_thread(self) -> None:
        """See whether several threads use the engine: `.grad` is autograd's then."""
        if threading.get_ident() != self._thread:
            self._has_threads = True

    def post(
        self,
        graph: RemoteGraph,
        gradients: Grads,
        double: DoubleBackward | None,
        may_defer: bool,
    ) -> None:
        """Post the gradients of a graph's outputs to its replicas."""
        workers = self.sync.workers
        with workers.lock:
            self.record_thread()
            self.wait_until_idle()
            if workers.steps is not None:
                workers.steps.backward_begins()
            bits = messages.KEEP_GRAPH if graph.is_held else 0
            is_deferred = None if may_defer and double is None else False
            n_deferred = len(self.sync.model.gradients.deferred)
            if n_deferred:  # of another graph in this same backward
                is_deferred = is_deferred is None and self._may_defer(graph)
                if not is_deferred:
                    self.add_deferred()
                    n_deferred = 0
            else:
                self._is_queued = False
            for k, places in enumerate(graph.places):
                adds = messages.ACCUMULATE if k < n_deferred else 0
                header = messages.BACKWARD_HEADER.pack(graph.number, bits | adds)
                if double is not None:
                    header = double.header(k, graph.number, bits)
                part = [gradients[i] for i in places]
                workers.channels[k].post(messages.BACKWARD, header, part)
            # The replicas are at work: now there is time to look.
            if is_deferred is None:
                is_deferred = self._may_defer(graph)
            if is_deferred and not self._is_queued:
                torch_core.at_end_of_backward(AddDeferred(self))
                self._is_queued = True  # not before: Ctrl-C may come between
            graph.gradients = None
            graph.double = double
            graph.is_deferred = is_deferred
            self._running = graph

    def _may_defer(self, graph: RemoteGraph) -> bool:
        """Tell whether nothing sees how the parameters' gradients come together."""
        gradients = self.sync.model.gradients
        return (
            gradients.slots is not None
            and torch_core.accumulates(self._token_node)
            and gradients.hooked() is None
            and not graph.is_in_ddp
            and not self._has_threads
            and not torch_core.is_compiled_autograd()
        )

    def wait(self) -> None:
        """Wait for the backward that the replicas run, and keep what they answer."""
        with self.sync.workers.lock:
            self._wait()

    def _wait(self) -> None:
        if self._running is None:
            return
        graph, self._running = self._running, None
        try:
            answers = self.sync.workers.take_answers(len(graph.places), True)
        except _native.PeerError:
            raise
        except Exception as error:
            if graph.is_deferred:
                raise
            graph.error = error.with_traceback(None)  # its frames hold the graph
            return
        if graph.double is not None:
            answers = graph.double.read(answers)
        in_slots = self.sync.model.gradients
        n_slots = len(in_slots.parameters)
        masks = tuple(payload[:n_slots] for payload, _, _ in answers)
        gradients = Gradients()
        for (payload, tensors, _), n in zip(answers, graph.n_inputs, strict=True):
            gradients.of_inputs += tensors[:n] or [None] * n
            gradients.fallbacks += odd_tensors.unpack(payload[n_slots:], tensors[n:])
        if self.sync.workers.steps is not None:
            self.sync.workers.steps.backward_ends()
        if graph.is_deferred:
            in_slots.defer(masks, gradients.fallbacks)
        else:
            gradients.of_slots = in_slots.take(masks, graph.slots, gradients.fallbacks)
        graph.gradients = gradients

    def wait_until_idle(self) -> None:
        """Wait until every replica is idle: the next request finds it listening."""
        self._wait()
        self.sync.workers.wait_until_idle()

    def add_deferred(self) -> None:
        """Add what the replicas have left to the parameters' gradients."""
        with self.sync.workers.lock:
            self._is_queued = False
            self._wait()
            self.sync.model.gradients.add_deferred()

    def forget(self) -> None:
        """Forget gradients of a backward that failed, and those on their way."""
        self._running, self._is_queued = None, False
        self.sync.model.gradients.drop_deferred()
