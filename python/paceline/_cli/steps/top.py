"""``paceline top``: the user's running jobs on this host, as they train."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from paceline._cli.options import Parser
from paceline._cli.steps import summary

DESCRIPTION = """\
Shows the jobs of this user that train with Paceline on this host: for each rank its
step, the median time of a step, the shares of that time in sums and in waits, the rank
that came last, what it does now, and its memory.  It only reads; jobs do not notice."""
EPILOGUE = """\
Columns: rank, pid, device, step (the last one); ms, the median time from the
end of a step to the end of the next; sums and waits, the shares of that time
in which this rank adds up gradients, or only waits for others; for, the rank
that came last, with its share of the waits; now, what this rank does, since
when, and the rank it waits for; RSS, its memory; last steps, bars of their
times. A narrow terminal leaves out last steps, then RSS, device, sums and pid.

Keys of --json: jobs, problems (files that cannot be read). A job has job (its
name), slowest (the rank that others wait for), rows. A row has kind (rank or
replicas), model, rank, world_size, local_rank, host, pid, device; step, steps
(how many are kept); step_ms, reducing, waiting (the columns ms, sums, waits,
from 0 to 1), awaited (shares by rank); activity, seconds, awaiting (the column
now); rss_bytes; history (ms of the last steps)."""
NEEDS_RICH = (
    "paceline top needs the package rich for its table: pip install rich; "
    "paceline top --json works without it"
)


def main(arguments: Sequence[str], program: str) -> int:
    """Run ``top`` with its arguments; return the exit status."""
    options = _read(arguments, program)
    if options.json:
        print(json.dumps(summary.as_json(*_look(options)), indent=2))
        return 0
    try:
        from paceline._cli.steps import table
    except ImportError:
        print(NEEDS_RICH, file=sys.stderr)
        return 1
    if options.once or not sys.stdout.isatty():
        table.print_once(*_look(options))
        return 0
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            size = live.console.size
            shown = table.picture(*_look(options), size.width, size.height)
            live.update(shown, refresh=True)
            time.sleep(options.interval)


def _read(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = Parser(f"{program} top", DESCRIPTION, EPILOGUE)
    parser.add_argument("--once", action="store_true", help="print one table, and end")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, and end"
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="seconds between two looks (1)",
    )
    parser.add_argument("--pid", type=int, help="only this process")
    parser.add_argument("--job", help="only this job: its name, or rank 0's pid")
    return parser.read(arguments)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0.05 <= (seconds := float(text)) <= 3600:
            return seconds
    raise argparse.ArgumentTypeError(f"{text}: give 0.05 to 3600 seconds")


def _look(options: argparse.Namespace) -> tuple[list[summary.Job], list[str]]:
    recordings, problems = summary.read(options.pid, options.job)
    try:
        return summary.jobs(recordings), problems
    finally:
        for recording in recordings:
            recording.close()
