"""Options of commands: an error is one line, with the word that was probably meant."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn


def meant(word: str, known: Iterable[str]) -> str:
    """Return a question that ends a message; "" if no known word is similar."""
    found = difflib.get_close_matches(word, list(known), 1, cutoff=0.7)
    return f": did you mean {found[0]}?" if found else ""


class Parser(argparse.ArgumentParser):
    """The parser of one command; its texts keep their line breaks."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=form)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            word = unknown[0].partition("=")[0]
            self.error(
                f"unknown argument {word}{meant(word, self._option_string_actions)}"
            )
        return options

    def error(self, message: str) -> NoReturn:
        """Print one line, and end with status 2."""
        print(f"{self.prog}: {message} ({self.prog} --help says more)", file=sys.stderr)
        raise SystemExit(2)
