"""The memory of a process, seen from outside."""

from __future__ import annotations

from pathlib import Path


def pss_mib(pid: int) -> float:
    """A process's memory; a page shared by n processes counts as 1/n of a page.

    The resident set would count shared buckets in full once for every rank.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("smaps_rollup has no Pss line")
