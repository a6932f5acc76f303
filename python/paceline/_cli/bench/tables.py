"""Prints tables: by rich where it is installed, else as plain text."""

from __future__ import annotations

from collections.abc import Sequence

Cells = Sequence[Sequence[str]]


def show(title: str, headings: Sequence[str], cells: Cells) -> None:
    """Print a table.

    Parameters
    ----------
    title : str
        What it has.
    headings : sequence of str
        Of the columns; those of numbers are aligned to the right.
    cells : sequence of sequence of str
        Line by line.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(as_text(title, headings, cells))
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading, is_number in zip(headings, _are_numbers(cells), strict=True):
        table.add_column(
            heading, justify="right" if is_number else "left", no_wrap=True
        )
    for line in cells:
        table.add_row(*line)
    console = Console(highlight=False)
    if not console.is_terminal:  # as wide as it is, for files and pipes
        console.width = 200
    console.print(table)
    console.print()


def as_text(title: str, headings: Sequence[str], cells: Cells) -> str:
    """Return a table as plain text, with an empty line behind it."""
    columns = list(zip(headings, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    are_numbers = _are_numbers(cells)
    lines = [title]
    for line in (headings, *cells):
        padded = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(line, widths, are_numbers, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join([*lines, ""])


def _are_numbers(cells: Cells) -> list[bool]:
    """Tell of each column whether all that it has begins with a digit, or is empty."""
    return [
        all(not cell or cell[0].isdigit() for cell in column)
        for column in zip(*cells, strict=True)
    ]
