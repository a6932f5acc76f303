"""What each replica has still to receive: updates, and the trees of its arguments.

A replica that had no part in a forward receives the updates with its next one.  Where
nobody knows whether an answer has come (an error, Ctrl-C), all is sent again; updates
have numbers, so that a replica applies each but once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import _native
    from paceline._dp.process import messages

Update = dict[str, Any]


class Outbox:
    """What some replicas have been sent, and have still to be sent.

    `modes` are those that all were sent last; `trees` are the trees of the replicas'
    outputs, as they have described them last.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._n_updates = 0
        self._is_in_forward = False
        self.clear()

    def clear(self) -> None:
        """Take replicas for new ones, which have received nothing yet."""
        self.modes: messages.Modes | None = None
        self.trees: list[_native.Tree | None] = [None] * self._n
        self._input_trees: list[_native.Tree | None] = [None] * self._n
        self._pending: list[list[Update]] = [[] for _ in range(self._n)]
        self._sent: list[list[Update]] = [[] for _ in range(self._n)]

    def dropped(self) -> list[int]:
        """Return the graphs that some replica may not have dropped yet."""
        waiting = [u for updates in (*self._pending, *self._sent) for u in updates]
        return [graph for update in waiting for graph in update.get("dropped", ())]

    def resend(self, replicas: Iterable[int]) -> None:
        """Send again what replicas may not have received, and ask for their trees."""
        for k in replicas:
            self._pending[k] = self._sent[k] + self._pending[k]
            self._sent[k] = []
            self._input_trees[k] = self.trees[k] = None

    def forward_begins(self) -> None:
        """Send all again if the last forward has not come to its end."""
        if self._is_in_forward:
            self.resend(range(self._n))
        self._is_in_forward = True

    def forward_ends(self) -> None:
        """Record that all replicas have answered that took part."""
        self._is_in_forward = False

    def add(self, update: Update) -> None:
        """Have all replicas receive an update with their next forward."""
        self._n_updates += 1
        update["number"] = self._n_updates
        for pending in self._pending:
            pending.append(update)

    def payload_for(self, k: int, tree: _native.Tree) -> dict[str, Any]:
        """Return what a replica has to receive before a forward of such inputs."""
        payload: dict[str, Any] = {}
        if self._pending[k]:
            payload["updates"] = self._pending[k]
        if self._input_trees[k] is None or tree != self._input_trees[k]:
            payload["tree"] = self._input_trees[k] = tree
        return payload

    def mark_sent(self, k: int) -> None:
        """Record that this payload is on its way."""
        self._sent[k], self._pending[k] = self._pending[k], []

    def mark_received(self, k: int) -> None:
        """Record that the replica has answered."""
        self._sent[k] = []
