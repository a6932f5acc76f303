"""Starts a group of ranks as processes of their own and never waits for ever.

Every rank is a fresh interpreter with one intra-op thread and the same environment,
whoever the contestants are.  `malloc="keep"` asks glibc to keep freed memory instead of
giving it back to the kernel: large tensors then need no new pages in each step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from job import Job

RANK_SCRIPT = Path(__file__).with_name("rank.py")
GRACE_SECONDS = 10.0  # for the other ranks, once one has failed
KEEP_BYTES = (1 << 31) - 1
KEEP_TUNABLES = (
    f"glibc.malloc.mmap_threshold={KEEP_BYTES}:glibc.malloc.trim_threshold={KEEP_BYTES}"
)


class GroupError(Exception):
    """A group failed or ran out of time; the message has the ranks' last output."""


def environment(malloc: str) -> dict[str, str]:
    """Make the environment of a rank."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if malloc == "keep":
        env["GLIBC_TUNABLES"] = ":".join(
            filter(None, [env.get("GLIBC_TUNABLES"), KEEP_TUNABLES])
        )
    return env


def run_group(job: Job, malloc: str) -> dict[str, Any]:
    """Run a job in `job.ranks` new processes and return rank 0's figures."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        job.save(folder / "job.json")
        logs = [(folder / f"log{rank}").open("w+") for rank in range(job.ranks)]
        ranks: list[subprocess.Popen[str]] = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, str(RANK_SCRIPT), name, str(rank)]
                ranks.append(
                    subprocess.Popen(
                        command,
                        env=environment(malloc),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        text=True,
                    )
                )
            wait_for(ranks, job.limit_seconds + GRACE_SECONDS)
            if any(rank.returncode for rank in ranks):
                raise GroupError(last_words(ranks, logs))
            figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
            return figures
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            for log in logs:
                log.close()


def wait_for(ranks: list[subprocess.Popen[str]], limit_seconds: float) -> None:
    """Wait until all have ended; kill the rest when one fails or time is over."""
    deadline = time.monotonic() + limit_seconds
    failed = False
    while any(rank.poll() is None for rank in ranks):
        if not failed and any(rank.returncode for rank in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(0.02)


def last_words(ranks: list[subprocess.Popen[str]], logs: Sequence[TextIO]) -> str:
    """The exit status and the end of the output of every rank that failed."""
    words = []
    for number, (rank, log) in enumerate(zip(ranks, logs, strict=True)):
        if rank.returncode:
            log.seek(0)
            tail = "\n".join(log.read().strip().splitlines()[-25:])
            words.append(f"rank {number} ended with status {rank.returncode}:\n{tail}")
    return "\n".join(words)
