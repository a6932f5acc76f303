"""What replicas have been told: news, and the trees of what is sent and comes back.

A replica that had no part in a forward hears the news with its next one.  Where nobody
knows whether an answer has come (an error, Ctrl-C), all is told again; news have
numbers, so that a replica takes each but once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import _native, _protocol

News = dict[str, Any]


class Told:
    """What each of some replicas has been told, and has still to hear.

    Parameters
    ----------
    n : int
        How many replicas.

    Attributes
    ----------
    modes : Modes or None
        Those that all were told last.
    trees : list of Tree or None
        Of each replica's output, as it has told it last.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._n_news = 0
        self.forget()

    def forget(self) -> None:
        """Take replicas for new ones, who have heard nothing yet."""
        self.modes: _protocol.Modes | None = None
        self.trees: list[_native.Tree | None] = [None] * self._n
        self._input_trees: list[_native.Tree | None] = [None] * self._n
        self._unheard: list[list[News]] = [[] for _ in range(self._n)]
        self._sent: list[list[News]] = [[] for _ in range(self._n)]

    def doubt(self, replicas: Iterable[int]) -> None:
        """Tell again what replicas may not have heard, and ask what they have told."""
        for k in replicas:
            self._unheard[k] = self._sent[k] + self._unheard[k]
            self._sent[k] = []
            self._input_trees[k] = self.trees[k] = None

    def add(self, news: News, replicas: Iterable[int]) -> None:
        """Have replicas hear news with their next forward."""
        self._n_news += 1
        news["number"] = self._n_news
        for k in replicas:
            self._unheard[k].append(news)

    def words_for(self, k: int, tree: _native.Tree) -> dict[str, Any]:
        """Return what a replica has to hear before a forward of such inputs."""
        words: dict[str, Any] = {}
        if self._unheard[k]:
            words["news"] = self._unheard[k]
        if self._input_trees[k] is None or tree != self._input_trees[k]:
            words["tree"] = self._input_trees[k] = tree
        return words

    def is_posted(self, k: int) -> None:
        """Note that those words are on their way."""
        self._sent[k], self._unheard[k] = self._unheard[k], []

    def is_heard(self, k: int) -> None:
        """Note that the replica has answered."""
        self._sent[k] = []
