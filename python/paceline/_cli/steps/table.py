"""The table of ``paceline top``, by rich; this module alone imports it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from paceline._cli.steps.summary import Job, Row

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 16
_STUCK_SECONDS = 5.0
_COLUMNS = ("rank", "pid", "device", "step", "ms", "sums", "waits", "for", "now", "RSS")


def picture(found: Sequence[Job], problems: Sequence[str]) -> Group:
    """Return all that is shown: a table a job, and what could not be read."""
    parts: list[Table | Text] = [_table(job) for job in found]
    if not found:
        parts.append(Text("No job of this user is recorded on this host."))
    parts += [Text(problem, style="yellow") for problem in problems]
    return Group(*parts)


def _table(job: Job) -> Table:
    first = job.rows[0]
    what = f"{first.world_size} ranks"
    if first.kind == "replicas":
        what = f"{first.world_size} replicas"
    title = f"{job.job}  {first.model}, {what}"
    if job.slowest is not None:
        title += f", waiting for {job.slowest} most"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in _COLUMNS:
        is_text = name in ("device", "for", "now")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    table.add_column("last steps", no_wrap=True)
    for row in job.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str | Text]:
    now = f"{row.activity}, {row.seconds:.0f} s"
    if row.awaiting is not None:
        now += f", for {row.awaiting}"
    is_stuck = row.seconds > _STUCK_SECONDS and row.step > 0
    waits_for = next(iter(row.awaited.items()), None)
    return [
        "all" if row.kind == "replicas" else str(row.rank),
        str(row.pid),
        row.device,
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
    """Print the table; as wide as it must be where nobody sees it in a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(picture(found, problems))
