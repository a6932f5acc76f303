"""A change of one place of a source, and one build that contains all of them.

An edit wraps its piece of the source in a condition, `pl_mutant(7) ? changed : as it
was`.  All processes map one file: its first word selects the active mutant, and a byte
behind it for each mutant records whether its place was reached (switch.h, switch.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

Edit = tuple[int, int, str, str]  # start, end, text before and after; @: the number
Place = tuple[str, str, int, int, str, tuple[Edit, ...]]
"""Function, operator, start, end, words, edits."""


@dataclass(frozen=True)
class Mutant:
    """One change of one piece of one source."""

    path: str
    function: str
    operator: str
    start: int
    end: int
    text: str  # the text at that place
    edits: tuple[Edit, ...]
    n: int  # its number among equal ones in this function, from 1
    line: int

    @property
    def name(self) -> str:
        """The mutant's name in tables, without a line, so that it survives edits."""
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
            # At one position, pieces that end come first, then the widest that begins.
            pieces.append((start, 1, -end, number, before))
            pieces.append((end, 0, -start, -number, behind))
    text, at = [], 0
    for position, *_, piece in sorted(pieces):
        text += [source[at:position], piece]
        at = position
    return "".join([*text, source[at:]])
