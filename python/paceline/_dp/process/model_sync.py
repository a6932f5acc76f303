"""What the workers have of the model, and what of it they receive before a forward."""

from __future__ import annotations

import enum
import pickle
from typing import Any

import torch

from paceline import _native
from paceline._dp.process import messages, pickling
from paceline._dp.process.shared_model import SharedModel
from paceline._dp.process.workers import ReplicaWorkers
from paceline._errors import last_line
from paceline._replicas.errors import UnsupportedModelError


class Phase(enum.Enum):
    """What the workers have of the model.

    ========  ==============  ==============  =================  =============
    phase     model is sent   a call is cut   workers are anew   made anew
    ========  ==============  ==============  =================  =============
    NEW       SENT            LOST            LOST               NEW
    SENT                      STALE           LOST               NEW
    STALE                     STALE           LOST               NEW
    LOST                      LOST            LOST               NEW
    ========  ==============  ==============  =================  =============
    """

    NEW = enum.auto()  # nothing yet of what was made last
    SENT = enum.auto()  # all that was known at the last forward
    STALE = enum.auto()  # the memory; nobody knows what else
    LOST = enum.auto()  # nothing, and what was made last may be outdated


class ModelSync:
    """Keeps the workers' replicas like the module of this process.

    `tried` are the modes whose trial is over; `dropped` are numbers of graphs that the
    workers may free, and have not received yet.
    """

    def __init__(self, module: torch.nn.Module, n_remote: int) -> None:
        self._script_globals = pickling.ScriptGlobals()
        self._n_remote = n_remote
        self.model = self._share(module, None)  # raises before a process is started
        self._phase = Phase.NEW
        self.tried: set[tuple[bool, bool]] = set()
        self.dropped: list[int] = []
        self.workers = ReplicaWorkers(n_remote)

    def _share(
        self, module: torch.nn.Module, previous: SharedModel | None
    ) -> SharedModel:
        with torch.inference_mode(False), torch.no_grad():
            return SharedModel(module, self._n_remote, self._script_globals, previous)

    def ensure_workers(self) -> None:
        """Start workers anew where that is needed."""
        if not self.workers.is_sound:
            self.close_workers()
            self.workers.start()
            self._phase = Phase.LOST
        self.workers.wait_until_ready()

    def close_workers(self) -> None:
        """End the workers, and forget the gradients that they have left."""
        self.model.gradients.drop_deferred()
        self.workers.close()

    def interrupted(self) -> None:
        """Record that some workers have received an update, and some have not."""
        has_memory = self._phase in (Phase.SENT, Phase.STALE)
        self._phase = Phase.STALE if has_memory else Phase.LOST

    def prepare(self, module: torch.nn.Module) -> None:
        """Have the workers receive with their next forward what has changed."""
        modes = messages.Modes.now()  # first: it may refuse this call
        changes = None
        if self.model.module is module and self._phase in (Phase.NEW, Phase.SENT):
            changes = self.model.changes()
        if changes is None:
            self._make_anew(module)
        if self._phase is Phase.NEW:
            self._send_model()
        update: dict[str, Any] = changes or {}
        outbox = self.workers.outbox
        if modes != outbox.modes:
            update["modes"] = outbox.modes = modes
        if self.dropped:
            update["dropped"], self.dropped = self.dropped, []
        if update:
            outbox.add(update)

    def _make_anew(self, module: torch.nn.Module) -> None:
        previous = self.model
        model = self._share(module, previous)
        if not model.keeps_memory:
            previous.memory.release()
        model.keeps_memory &= self._phase in (Phase.SENT, Phase.STALE)
        self.model = model
        self._phase = Phase.NEW

    def _send_model(self) -> None:
        """Have every replica build its module, side by side."""
        for k, channel in enumerate(self.workers.channels):
            payload = pickling.dumps(self.model.describe(k), {})
            channel.post(messages.MODEL, payload, [])
        try:
            answers = self.workers.take_answers(self._n_remote, True)
        except _native.PeerError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"a worker process cannot build it ({last_line(error)})"
            ) from error
        for payload, _, _ in answers:
            self.model.imported.compare(pickle.loads(payload))
        self.dropped += self.workers.outbox.dropped()
        self.workers.outbox.clear()
        self.tried.clear()
        self._phase = Phase.SENT

    def update_for(self, k: int, tree: _native.Tree) -> bytes:
        """Return what a replica receives with a forward of such inputs, pickled."""
        payload = self.workers.outbox.payload_for(k, tree)
        return pickling.dumps(payload, {}, self._script_globals) if payload else b""

    def close(self) -> None:
        """Let the workers go, and the parameters have ordinary memory again."""
        self.close_workers()
        self.model.memory.release()
