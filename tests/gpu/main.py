"""Run the parts in order, each in separate processes with a time limit.

A part is `python part.py NAME`.  It appends a JSON line for each check to a file, which
survives a crash of the part.  Its output goes to the terminal and to the text at once.
A part that exceeds its limit is killed with all processes that it has started, and the
next part begins.  This file does not import torch, so that a torch that is broken or
hangs is a finding and does not end the run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from report import Report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KILL_SECONDS = 10.0  # from SIGTERM to SIGKILL
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Part:
    name: str
    limit_seconds: float
    what: str
    needs_package: bool = True


# In the order in which they run: the most informative parts come first.
PARTS = [
    Part("first", 240, "does it work at all: a few checks of each part below", False),
    Part("build", 300, "the package with nvcc and without, and the kernels", False),
    Part("kernels", 150, "every kernel, from either origin, against torch", False),
    Part("nccl", 240, "2 and 3 ranks on the one GPU: models, AMP, graphs, ..."),
    Part("replicas", 120, "DataParallel: 2 and 3 replicas on the GPU"),
    Part("failures", 150, "errors in backward, dead and silent ranks, bad input"),
    Part("contexts", 60, "copies and events between contexts, as between GPUs"),
    Part("alone", 150, "one rank with a reducer: as nccl"),
    Part("rows", 240, "the rows of tests/parity for GPUs; needs pytest"),
    Part("expandable", 150, "replicas and alone, torch's segments are expandable"),
    Part("pools", 150, "replicas and alone, torch allocates by cudaMallocAsync"),
    Part("sanitizer", 240, "compute-sanitizer: contexts, kernels, a step"),
    Part("shared", 240, "2 ranks on the one GPU as NCCL 2.30.3 and later allow it"),
    Part("traces", 90, "a trace of a step of each wrapper, by torch.profiler"),
    Part("bench", 420, "timings against torch's DDP and DP and the plain module"),
    Part("memory", 240, "what gradients cost, against torch DDP"),
    Part("rehearsal", 600, "alone, nccl and failures in few processes, for --fake"),
]
BY_NAME = {part.name: part for part in PARTS}
ALL = [part.name for part in PARTS if part.name != "rehearsal"]
GROUPS = {
    "correct": ALL[ALL.index("kernels") : ALL.index("traces")],
    "speed": ALL[ALL.index("traces") :],
    "all": ALL,
}
CALLS = ("first", "correct", "speed")  # each one a call of at most 9.5 minutes
CALL_SECONDS = 570.0
MERGED = {"alone", "nccl", "failures"}  # `rehearsal` runs them
ON_A_GPU = {"kernels", "expandable", "pools", "sanitizer", "shared"}  # not rehearsed


def parse_arguments(words: list[str]) -> argparse.Namespace:
    lines = [f"  {p.name:<10} {p.limit_seconds:.0f} s  {p.what}" for p in PARTS]
    lines += [f"  {name:<10} {' '.join(parts)}" for name, parts in GROUPS.items()]
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run.sh",
        description="Tests and measures Paceline on one GPU.",
        epilog="parts, and their limits:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("parts", nargs="*", default=["all"], metavar="part")
    add("--within", type=float, metavar="SECONDS", help="limit of the whole call")
    add("--limit", type=float, metavar="SECONDS", help="limit of each part")
    add("--only", default="", metavar="TEXT", help="only checks whose names contain it")
    add("--fake", action="store_true", help="rehearse on simulated CUDA and NCCL")
    add("--quick", action="store_true", help="fewer sizes and rounds")
    args = parser.parse_args(words)
    if args.within is None and set(args.parts) <= set(CALLS):
        args.within = CALL_SECONDS
    args.parts = expand(args.parts, parser, args.fake)
    args.is_installed = args.fake and has_package() and "build" not in args.parts
    return args


def has_package() -> bool:
    return importlib.util.find_spec("paceline") is not None


def expand(
    names: list[str], parser: argparse.ArgumentParser, is_fake: bool = False
) -> list[str]:
    """Return the selected parts, once each, in order, with the build that they need.

    With simulated GPUs an installed package suffices, unless a part builds more.
    """
    wanted = set()
    for name in names:
        if name not in BY_NAME and name not in GROUPS:
            known = ", ".join([*BY_NAME, *GROUPS])
            parser.error(f"no part {name!r}; there are {known}")
        group = set(GROUPS.get(name, ()))
        if is_fake and group & MERGED:
            group = group - MERGED - ON_A_GPU | {"rehearsal"}
        wanted |= group or {name}
    is_enough = is_fake and has_package() and "kernels" not in wanted
    if wanted != {"first"} and not is_enough:
        wanted.add("build")  # `first` builds what it needs itself
    return [part.name for part in PARTS if part.name in wanted]


class Running:
    """A running part, in a separate process group."""

    def __init__(self, command: list[str], env: dict[str, str], log: Report) -> None:
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._copy, args=(log,), daemon=True)
        self._reader.start()

    def _copy(self, log: Report) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            log.say(line.decode(errors="replace"))

    def wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """End the part and all processes that it has left in its group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            if self.wait(KILL_SECONDS) and number == signal.SIGTERM:
                time.sleep(0.2)  # its children may be ending
        self._reader.join(2.0)


def run_part(
    part: Part, limit: float, env: dict[str, str], report: Report, command: list[str]
) -> None:
    """Run one part and keep its findings, even if it crashes or hangs."""
    begin = time.monotonic()
    report.begin(part.name, limit)
    running = Running(command, env, report)
    why = ""
    try:
        while not running.wait(min(POLL_SECONDS, limit)):
            report.write_if_more_is_known()
            if time.monotonic() - begin > limit:
                why = f"stopped after {limit:.0f} s"
                break
    finally:
        running.end()
    status = running.process.returncode
    if not why and status != 0:
        why = f"ended with status {status}"
    report.end(part.name, time.monotonic() - begin, why)


def stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(words: list[str], script: Path = HERE / "part.py") -> int:
    args = parse_arguments(words)
    signal.signal(signal.SIGTERM, stop)
    out = Path(os.environ.get("OUT") or HERE / "results")
    report = Report(out, "rehearsal" if args.fake else None)
    if not args.fake:
        report.questions = {name: BY_NAME[name].what for name in ALL}
    begin = time.monotonic()
    env = {
        "PACELINE_GPU_RECORD": str(report.record),
        "PACELINE_GPU_OUT": str(out.resolve()),
        "PACELINE_GPU_QUICK": "1" if args.quick else "",
        "PACELINE_GPU_FAKE": "1" if args.fake else "",
        "PACELINE_GPU_INSTALLED": "1"
        if args.fake and "build" not in args.parts
        else "",
    }
    try:
        for name in args.parts:
            part = BY_NAME[name]
            limit = args.limit or part.limit_seconds
            if args.within is not None:
                left = args.within - (time.monotonic() - begin) - 2 * KILL_SECONDS
                limit = min(limit, left)
                if left < 10:
                    report.leave_out(name, "no time was left")
                    continue
            is_built = env["PACELINE_GPU_INSTALLED"] or report.has_build()
            if part.needs_package and not is_built:
                report.leave_out(name, "there is no build")
                continue
            env["PACELINE_GPU_SECONDS"] = str(limit)
            env["PACELINE_GPU_ONLY"] = "" if name in ("first", "build") else args.only
            command = [sys.executable, str(script), name]
            run_part(part, limit, env, report, command)
    except KeyboardInterrupt as error:
        report.say(f"\ninterrupted {error}\n")
        report.is_complete = False
    report.finish()
    return 0 if report.is_complete and report.is_green() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
