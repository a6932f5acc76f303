"""The table of ``paceline top``; only this module imports rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console, Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from paceline._cli.steps.summary import Job, RankRow

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 16
_STUCK_SECONDS = 5.0
_NUMBERS = ("rank", "pid", "step", "ms", "sums", "waits", "RSS")
_COLUMNS = (
    *("rank", "pid", "device", "step", "ms", "sums", "waits", "for", "now", "RSS"),
    "last steps",
)
_OPTIONAL = ("last steps", "RSS", "device", "sums", "pid")
"""Columns that a narrow terminal leaves out, in this order."""
_GAP = 2
_HEAD_LINES = 2
_LEAST_ROWS = 4  # of a job that is cut


def picture(
    found: Sequence[Job], problems: Sequence[str], width: int, height: int = sys.maxsize
) -> Group:
    """Return all that is shown: one table per job, and what could not be read.

    It says what a terminal of this height has no room for.
    """
    parts: list[Table | Text] = []
    room = height - len(problems) - 2  # for what is said below
    for n_shown, job in enumerate(found):
        n_rows = min(len(job.rows), room - _HEAD_LINES)
        if n_rows < min(len(job.rows), _LEAST_ROWS):
            rest = f"... {len(found) - n_shown} more: --job chooses one"
            parts.append(Text(rest, style="yellow"))
            break
        parts.append(_table(job, width, n_rows))
        if n_rows < len(job.rows):
            rest = f"... {len(job.rows) - n_rows} more ranks: --pid chooses one"
            parts.append(Text(rest, style="yellow"))
        room -= _HEAD_LINES + n_rows
    if not found:
        parts.append(Text("No job of this user is recorded on this host."))
    parts += [Text(problem, style="yellow") for problem in problems]
    return Group(*parts)


def _widths(rows: list[list[str | Text]], most: int) -> dict[str, int]:
    """Return the columns that fit, with their widths: only `now` is ever cut."""
    columns = zip(_COLUMNS, *rows, strict=True)
    widths = {str(column[0]): max(map(len, column)) for column in columns}
    for name in (*_OPTIONAL, "now"):
        excess = sum(widths.values()) + _GAP * (len(widths) - 1) - most
        if excess > 0 and name == "now":
            widths[name] = max(widths[name] - excess, len(name))
        elif excess > 0:
            del widths[name]
    return widths


def _table(job: Job, most: int, n_rows: int) -> Table:
    first = job.rows[0]
    what = f"{first.world_size} ranks"
    if first.kind == "replicas":
        what = f"{first.world_size} replicas"
    title = f"{job.job}  {first.model}, {what}"
    if job.slowest is not None:
        title += f", waiting for {job.slowest} most"
    shown = Text(title, style="table.title")  # a string would be read as markup
    table = Table(title=shown, title_justify="left", box=None, pad_edge=False)
    rows = [_cells(row) for row in job.rows[:n_rows]]
    widths = _widths(rows, most)
    for name, width in widths.items():
        side: JustifyMethod = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=side, no_wrap=True, width=width)
    for cells in rows:
        table.add_row(*(c for n, c in zip(_COLUMNS, cells, strict=True) if n in widths))
    return table


def _cells(row: RankRow) -> list[str | Text]:
    now = f"{row.activity}, {row.seconds:.0f} s"
    if row.awaiting is not None:
        now += f", for {row.awaiting}"
    is_stuck = row.seconds > _STUCK_SECONDS and row.step > 0
    waits_for = next(iter(row.awaited.items()), None)
    return [
        "all" if row.kind == "replicas" else str(row.rank),
        str(row.pid),
        Text(row.device),
        str(row.step),
        "" if row.step_ms is None else f"{row.step_ms:.2f}",
        _percent(row.reducing),
        _percent(row.waiting),
        "" if waits_for is None else f"{waits_for[0]} ({waits_for[1]:.0%})",
        Text(now, style="red" if is_stuck else ""),
        "" if row.rss_bytes is None else f"{row.rss_bytes / 2**20:.0f} MiB",
        _bars(row.history[-_HISTORY:]),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _bars(times: Sequence[float]) -> str:
    most = max(times, default=0.0)
    if most <= 0:
        return ""
    return "".join(_BARS[min(int(t / most * len(_BARS)), 7)] for t in times)


def print_once(found: Sequence[Job], problems: Sequence[str]) -> None:
    """Print the table; a file gets 200 columns, unless COLUMNS is set."""
    console = Console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console = Console(width=200)
    console.print(picture(found, problems, console.width))
