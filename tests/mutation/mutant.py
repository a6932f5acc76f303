"""One change to one place of one source."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """One replacement of one piece of one source."""

    path: str
    function: str
    operator: str
    start: int
    end: int
    text: str  # what stands there
    replacement: str
    n: int  # of those that read the same in this function, from 1
    line: int

    @property
    def name(self) -> str:
        """What the mutant is called in tables: no line, so that it outlives edits."""
        suffix = f" ({self.n})" if self.n > 1 else ""
        return f"{self.path} {self.function}(): {self.operator}: {self.words}{suffix}"

    @property
    def words(self) -> str:
        """The piece in one line."""
        return " ".join(self.text.split())

    def applied_to(self, source: str) -> str:
        """Return the source with the replacement made."""
        return source[: self.start] + self.replacement + source[self.end :]
