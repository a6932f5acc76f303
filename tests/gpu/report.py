"""The results so far: one JSON file and one text file, complete at any moment.

A later call on the same machine, day and commit adds its parts to the files.  If a part
runs again, it replaces its earlier results.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
NOT_RUN = "not run"
BUILD = "imports"  # all other checks need this one to pass
N_WORDS = 4000  # characters of a failure in the JSON; the text has all
HEADER = Path(sysconfig.get_path("include"), "Python.h")
PACKAGES = (
    *("torch", "numpy", "triton", "cloudpickle", "setuptools", "pytest"),
    "nvidia-nccl-cu13",
)


def ask(*command: str) -> str:
    """Return the first line of a command's output; "" if it cannot be run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True, cwd=ROOT
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0].strip()


def ask_gpu(what: str) -> str:
    return ask("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader")


def version_of(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def describe_machine() -> dict[str, Any]:
    """Describe the machine for readers of the figures, without using torch."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "gpu": ask_gpu("name") or "none",
        "gpu_memory": ask_gpu("memory.total"),
        "driver": ask_gpu("driver_version"),
        "commit": ask("git", "describe", "--always", "--dirty") or "unknown",
        "kernel": platform.release(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "gcc": ask(os.environ.get("CC", "gcc"), "--version") or "missing",
        "nvcc": ask("nvcc", "--version") or "not on PATH",
        "Python.h": "there" if HEADER.exists() else f"missing: {HEADER}",
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
    }


class Report:
    def __init__(self, out: Path, name: str | None = None) -> None:
        out.mkdir(parents=True, exist_ok=True)
        machine = describe_machine()
        word = name or re.sub(r"[^A-Za-z0-9]+", "-", machine["gpu"]).strip("-")
        stem = f"{machine['date'][:10]}-{word}"
        self.json = out / f"{stem}.json"
        self.text = out / f"{stem}.txt"
        self.results: dict[str, Any] = {"machine": machine, "parts": {}}
        self.is_complete = True
        self.questions: dict[str, str] = {}  # the question that each part answers
        self._this_call: list[str] = []
        self._take_over()
        self._lock = threading.Lock()
        self._log = self.text.open("a")
        fd, path = tempfile.mkstemp(prefix="paceline-gpu-", suffix=".jsonl")
        os.close(fd)
        self.record = Path(path)
        self._n_written = 0  # bytes of the record that the JSON holds
        self.say("".join(f"{key:<12} {value}\n" for key, value in machine.items()))

    def _take_over(self) -> None:
        try:
            old = json.loads(self.json.read_text())
            same = old["machine"]["commit"] == self.results["machine"]["commit"]
            parts = dict(old["parts"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        if same:
            self.results["parts"] = parts

    # ---- as it goes -----------------------------------------------------------------

    def say(self, words: str) -> None:
        """Print words and add them to the text, both at once."""
        with self._lock:
            sys.stdout.write(words)
            sys.stdout.flush()
            self._log.write(words)
            self._log.flush()

    def begin(self, part: str, limit: float) -> None:
        self.record.write_text("")
        self._this_call.append(part)
        self.results["parts"][part] = {"result": "running", "checks": []}
        self.say(f"\n==== {part} (at most {limit:.0f} s)\n")
        self.write()

    def end(self, part: str, seconds: float, why: str) -> None:
        """Judge a part by its checks and by `why` it ended early; "" if it did not."""
        self._read_record(part)
        found = self.results["parts"][part]
        counts = count(found["checks"])
        bad = counts.get(FAILED, 0) + counts.get(NOT_RUN, 0)
        if bad and not why.startswith("stopped"):
            why = ""  # its checks tell
        good = not why and not bad and (counts or part == "build")
        found["result"] = PASSED if good else FAILED
        found["seconds"] = round(seconds, 1)
        if why:
            found["why"] = why
        elif not counts:
            found["why"] = "nothing was checked"
        words = f"{found['result']} after {seconds:.0f} s, {describe(counts)}"
        self.say(f"==== {part}: {words} {found.get('why', '')}\n")
        self.write()

    def leave_out(self, part: str, why: str) -> None:
        self._this_call.append(part)
        self.results["parts"][part] = {"result": NOT_RUN, "why": why, "checks": []}
        self.say(f"\n==== {part}: not run: {why}\n")
        self.write()

    def _read_record(self, part: str) -> None:
        checks = []
        for line in self.record.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # the process was killed while it wrote
                continue
            for key in ("words", "output"):
                if isinstance(row.get(key), str):
                    row[key] = row[key][-N_WORDS:]
            checks.append(row)
        self.results["parts"][part]["checks"] = checks

    def write_if_more_is_known(self) -> None:
        if self.record.stat().st_size != self._n_written:
            self.write()

    def write(self) -> None:
        """Write all results; the file is complete at any moment."""
        self._n_written = self.record.stat().st_size
        for part, found in self.results["parts"].items():
            if found["result"] == "running":
                self._read_record(part)
        draft = self.json.with_suffix(".json.part")
        draft.write_text(json.dumps(self.results, indent=1) + "\n")
        draft.replace(self.json)

    # ---- at the end -----------------------------------------------------------------

    def has_passed(self, part: str) -> bool:
        return self.results["parts"].get(part, {}).get("result") == PASSED

    def answers(self, part: str) -> bool:
        rows = self.results["parts"].get(part, {}).get("checks", [])
        return self.has_passed(part) and any(row["result"] == PASSED for row in rows)

    def has_build(self) -> bool:
        """Tell whether a package was built; other checks of it may have failed."""
        rows = self.results["parts"].get("build", {}).get("checks", [])
        return any(r["check"] == BUILD and r["result"] == PASSED for r in rows)

    def is_green(self) -> bool:
        return all(self.has_passed(part) for part in self._this_call)

    def finish(self) -> None:
        """Write the files, print a short summary, remove temporary files."""
        for part in self._this_call:
            found = self.results["parts"][part]
            if found["result"] == "running":
                self._read_record(part)
                found.update(result=FAILED, why="interrupted")
        self.write()
        self.say("\n==== summary\n" + self.summary())
        self.say(f"written: {self.json} and {self.text}\n")
        self.record.unlink(missing_ok=True)
        self._log.close()

    def summary(self) -> str:
        lines = []
        for part in self._this_call:
            found = self.results["parts"][part]
            why = found.get("why", "")
            words = describe(count(found["checks"]))
            lines.append(f"{part:<10} {found['result']:<8} {words} {why}".rstrip())
            for row in found["checks"]:
                if row["result"] in (FAILED, NOT_RUN):
                    last = row.get("words", "").strip().rpartition("\n")[2]
                    lines.append(f"    {row['result']}: {row['check']}: {last[:200]}")
            lines += [f"    {line}" for line in lines_of_figures(found["checks"])]
        unanswered = {k: v for k, v in self.questions.items() if not self.answers(k)}
        if unanswered:
            lines.append("still unanswered:")
            lines += [f"    {part:<10} {what}" for part, what in unanswered.items()]
        return "\n".join(lines) + "\n"


def count(checks: list[dict[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in checks:
        counts[row["result"]] = counts.get(row["result"], 0) + 1
    return counts


def describe(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {result}" for result, n in sorted(counts.items()))


def lines_of_figures(checks: list[dict[str, Any]]) -> list[str]:
    return [line for row in checks for line in row.get("lines", [])]
