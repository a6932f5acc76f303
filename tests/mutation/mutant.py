"""One change to one place of one source, and how all of them are built in at once.

Every mutant is compiled into one build: an edit wraps its piece of the source in a
question, `pl_mutant(7) ? changed : as it was`.  One word of a file that all processes
map says which mutant is on, and a byte behind it for each mutant that its place was
reached (switch.h, switch.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

Edit = tuple[int, int, str, str]  # start, end, what goes before and behind; @: number
Place = tuple[str, str, int, int, str, tuple[Edit, ...]]
"""Function, operator, start, end, words, edits."""


@dataclass(frozen=True)
class Mutant:
    """One change to one piece of one source."""

    path: str
    function: str
    operator: str
    start: int
    end: int
    text: str  # what stands there
    edits: tuple[Edit, ...]
    n: int  # of those that read the same in this function, from 1
    line: int

    @property
    def name(self) -> str:
        """What the mutant is called in tables: no line, so that it outlives edits."""
        suffix = f" ({self.n})" if self.n > 1 else ""
        words = " ".join(self.text.split())
        return f"{self.path} {self.function}(): {self.operator}: {words}{suffix}"


def mutants_at(path: str, source: str, places: Iterable[Place]) -> list[Mutant]:
    seen: dict[tuple[str, str, str], int] = {}
    found = []
    for function, operator, start, end, text, edits in places:
        key = (function, operator, " ".join(text.split()))
        seen[key] = seen.get(key, 0) + 1
        line = source.count("\n", 0, start) + 1
        found.append(
            Mutant(path, function, operator, start, end, text, edits, seen[key], line)
        )
    return found


def instrumented(source: str, mutants: Iterable[tuple[int, Mutant]]) -> str:
    pieces = []
    for number, mutant in mutants:
        for start, end, before, behind in mutant.edits:
            before, behind = (s.replace("@", str(number)) for s in (before, behind))
            # At one position: what ends there comes first, then the widest that begins.
            pieces.append((start, 1, -end, number, before))
            pieces.append((end, 0, -start, -number, behind))
    text, at = [], 0
    for position, *_, piece in sorted(pieces):
        text += [source[at:position], piece]
        at = position
    return "".join([*text, source[at:]])
