"""Run checks on ranks: several processes on one GPU, each with its own host id.

NCCL refuses two ranks on one GPU unless they look like two hosts (`NCCL_HOSTID`).  Then
it sends by sockets over loopback, and kernels of different processes take turns on the
device.  So a small all-reduce takes about 13 ms: this is for correctness only.  From
2.30.3 on, NCCL can run two ranks on one GPU (`NCCL_MULTI_RANK_GPU_ENABLE`): `share()`.

Starting Python, torch, CUDA and NCCL takes seconds, so ranks run one check after
another.  If a check fails on one rank, all are ended, since the state of the others is
unknown, and fresh ranks run the remaining checks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checks import Check, is_fake, is_wanted, record, rehearsed, simulated

HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0  # until a rank begins its first check
GRACE_SECONDS = 15.0  # for the other ranks, after one has failed
POLL_SECONDS = 0.02
SLOWNESS = rehearsed(1, 4)  # in a rehearsal the machine may have other work
N_OUTPUT = 6000  # characters of a rank's output that are shown

SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": "WARN",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_NUM_THREADS": "2",
}


@dataclass
class Session:
    """A set of ranks that live until a check fails or all checks are done."""

    size: int
    checks: list[Check]
    folder: Path = field(init=False)
    processes: list[subprocess.Popen[bytes]] = field(init=False)

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-gpu-"))
        job = {
            "size": self.size,
            "port": free_port(),
            "checks": [(c.module, c.name, c.seconds) for c in self.checks],
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        self.processes = [self._start(rank) for rank in range(self.size)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        env = {**os.environ, **ENVIRONMENT, **dict(self.checks[0].env)}
        if env.get(SHARE) != "1":
            env["NCCL_HOSTID"] = f"paceline-{rank}"
        if is_fake():
            env.update(simulated().environment())
        with open(self.folder / f"output.{rank}", "wb") as output:
            return subprocess.Popen(
                [sys.executable, str(HERE / "rank.py"), str(self.folder), str(rank)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def rows(self, number: int) -> dict[int, dict[str, Any]]:
        """Return the ranks' reports on a check so far."""
        found = {}
        for rank in range(self.size):
            try:
                text = (self.folder / f"said.{rank}").read_text()
            except FileNotFoundError:
                continue
            for line in text.splitlines(keepends=True):
                if line.endswith("\n") and (row := json.loads(line))["n"] == number:
                    found[rank] = row
        return found

    def wait(self, number: int, until: float) -> tuple[dict[int, dict[str, Any]], str]:
        """Wait until all ranks that should report on a check have, or tell why not."""
        check = self.checks[number]
        expected = set(range(self.size)) - set(check.dying)
        while True:
            rows = self.rows(number)
            if expected <= set(rows):
                return rows, ""
            dead = {
                rank: status
                for rank, process in enumerate(self.processes)
                if (status := process.poll()) is not None and rank not in rows
            }
            unexpected = {r: s for r, s in dead.items() if r in expected}
            failed = [r for r, row in rows.items() if row["result"] == "failed"]
            if unexpected or failed:
                until = min(until, time.monotonic() + GRACE_SECONDS)
                if set(rows) | set(unexpected) >= expected:
                    words = f"ranks ended: {unexpected} (rank: status)"
                    return rows, words if unexpected else ""
            if time.monotonic() > until:
                silent = sorted(expected - set(rows))
                return rows, f"ranks {silent} did not finish"
            time.sleep(POLL_SECONDS)

    def outputs(self) -> str:
        words = []
        for rank in range(self.size):
            text = (self.folder / f"output.{rank}").read_text(errors="replace").strip()
            if text:
                if len(text) > N_OUTPUT:
                    text = f"{text[: N_OUTPUT // 2]}\n[...]\n{text[-N_OUTPUT // 2 :]}"
                words.append(f"---- output of rank {rank}\n{text}")
        return "\n".join(words)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask_for_stacks(self) -> None:
        """Have the ranks print the stacks of all threads (see rank.py)."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def share(checks: list[Check]) -> list[Check]:
    """Return the checks, for ranks that NCCL treats as on one GPU of one host."""
    return [replace(c, env=(*c.env, (SHARE, "1"))) for c in checks]


def judge(rows: dict[int, dict[str, Any]], why: str) -> tuple[str, str]:
    """Judge the ranks' reports: passed, failed or skipped, and the reason."""
    words = [
        f"rank {rank}: {row['words']}"
        for rank, row in sorted(rows.items())
        if row["result"] == "failed"
    ]
    if why or words:
        return "failed", "\n".join([*words, why]).strip()
    skipped = [row["words"] for row in rows.values() if row["result"] == "skipped"]
    if skipped and len(skipped) < len(rows):
        return "failed", f"skipped only on some ranks: {skipped[0]}"
    return ("skipped", skipped[0]) if skipped else ("passed", "")


def run_on_ranks(checks: list[Check], sizes: tuple[int, ...], until: float) -> bool:
    """Run each check in all its sizes of worlds; return whether all passed."""
    good = True
    for size in sizes:
        left = [c for c in checks if size in c.worlds]
        left = [c for c in left if is_wanted(f"{c.name}[{size}]")]
        for each in left:
            if each.needs_cuda and is_fake():
                record(f"{each.name}[{size}]", "skipped", 0, words="needs a GPU")
        left = [c for c in left if not (c.needs_cuda and is_fake())]
        while left:
            n_done, well = run_session(size, left, until)
            good = good and well
            left = left[n_done:]
    return good


def together(checks: list[Check]) -> list[Check]:
    if checks[0].fresh or checks[0].dying:
        return checks[:1]
    n = 1
    while n < len(checks) and not checks[n].fresh and checks[n].env == checks[0].env:
        n += 1
        if checks[n - 1].dying:
            break
    return checks[:n]


def run_session(size: int, checks: list[Check], until: float) -> tuple[int, bool]:
    """Run checks until one fails; return the number done, and whether all passed."""
    if time.monotonic() > until - 5:
        for each in checks:
            record(f"{each.name}[{size}]", "not run", 0, words="no time was left")
        return len(checks), False
    group = together(checks)
    session = Session(size, group)
    begin = time.monotonic()
    extra = START_SECONDS
    try:
        for number, each in enumerate(group):
            limit = min(until, begin + SLOWNESS * each.seconds + extra)
            rows, why = session.wait(number, limit)
            result, words = judge(rows, why)
            row = rows.get(0, {})
            seconds = row.get("seconds", time.monotonic() - begin)
            if result == "failed" and why and time.monotonic() >= until:
                for late in checks[number:]:
                    name = f"{late.name}[{size}]"
                    record(name, "not run", 0, words="no time was left")
                return len(checks), False
            if result == "failed":
                if why:
                    session.ask_for_stacks()
                output = session.outputs()
                name = f"{each.name}[{size}]"
                record(name, result, seconds, words=words, output=output)
                return number + 1, False
            figures = row.get("figures")
            record(f"{each.name}[{size}]", result, seconds, figures, words=words)
            begin, extra = time.monotonic(), 0.0
    finally:
        session.end()
    return len(group), True
