"""``paceline trace``: the last steps of running jobs, as a file for Perfetto."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import _files
from paceline._cli.options import Parser
from paceline._cli.steps import events, summary

DESCRIPTION = """\
Writes the last steps of this user's jobs on this host as a trace for
https://ui.perfetto.dev and chrome://tracing: for each rank its forwards, backwards,
reductions of buckets and waits, all by one clock.  It only reads; jobs do not
notice."""


def main(arguments: Sequence[str], program: str) -> int:
    """Run ``trace`` with its arguments; return the exit status."""
    parser = Parser(f"{program} trace", DESCRIPTION)
    parser.add_argument(
        "-o",
        "--output",
        default="trace.json",
        metavar="FILE",
        help="where to write it (trace.json); -: standard output",
    )
    parser.add_argument("--pid", type=int, help="only this process")
    parser.add_argument("--job", help="only this job: its name, or rank 0's pid")
    options = parser.read(arguments)
    recordings, problems = summary.read(options.pid, options.job)
    for problem in problems:
        print(f"paceline: {problem}", file=sys.stderr)
    found = events.trace(recordings)
    n_steps = sum(
        event["ph"] == "X" and event["tid"] == events.STEP
        for event in found["traceEvents"]
    )
    if n_steps == 0:
        print("paceline: no steps of such a job are recorded here", file=sys.stderr)
        return 1
    text = json.dumps(found)
    if options.output == "-":
        print(text)
        return 0
    path = Path(options.output)
    _files.write_whole(path, lambda file: file.write(text.encode()))
    print(f"{n_steps} steps of {len(recordings)} processes: {path}")
    return 0
