"""What the command lines of the benchmarks have in common: lists of names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection


def split_names(
    parser: argparse.ArgumentParser, text: str, known: Collection[str]
) -> list[str]:
    """Split a list with commas; every name must be known."""
    names = list(known) if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"unknown {name!r}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def present_names(
    parser: argparse.ArgumentParser,
    text: str | None,
    known: Collection[str],
    why_missing: Callable[[str], str | None],
) -> list[str]:
    """Find who takes part: whoever was asked for, else whoever is there."""
    if text is not None:
        names = split_names(parser, text, known)
        for name in names:
            if reason := why_missing(name):
                parser.error(f"{name}: {reason}")
        return names
    names = []
    for name in known:
        if reason := why_missing(name):
            print(f"left out: {name}: {reason}", file=sys.stderr)
        else:
            names.append(name)
    return names
