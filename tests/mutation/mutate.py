"""Break the product in one place at a time, and find the tests that fail.

    python tests/mutation/mutate.py                      # all, each until a test fails
    python tests/mutation/mutate.py --list               # only lists the mutants
    python tests/mutation/mutate.py --only deferred_copies
    python tests/mutation/mutate.py --only csrc/reducer --sample 40 --by-level

See README.md.  Exits with status 1 if a mutant survives that equivalent.py does not
list with a reason, or if it lists a mutant that is killed.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import switch
from equivalent import equivalents
from mutant import ROOT, Mutant, instrumented
from mutants import all_mutants

HERE = Path(__file__).parent
BUILD = ROOT / "build/mutation"
TREE = BUILD / "tree"
SITE = TREE / "build/site"
RESULTS, TABLE = BUILD / "results.json", BUILD / "table.md"
FLAGS = f"-O1 -w -include {HERE}/switch.h"
SANITIZERS = "-g -fsanitize=address,undefined -fno-sanitize-recover=all"
EQUIVALENT = equivalents()
SLOWEST = 20  # seconds that a test may take longer than without a mutant

# Tests that exercise the CPU path quickly.
PARITY_FILES = """
ddp/test_accumulation ddp/test_models ddp/test_cuda_as_on_the_cpu ddp/test_comm_hooks
ddp/test_gradients ddp/test_join ddp/test_sparse dp/test_data_parallel_as_torch
dp/test_data_parallel_calls dp/test_data_parallel_errors dp/test_data_parallel_programs
dp/test_data_parallel_randoms dp/test_data_parallel_state
"""
WHOLE = "parity/d*/test_*.py", "unit/[cdil]*/test_*.py", "unit/test_*.py"


def files_of(level: str, *, is_whole: bool) -> list[str]:
    """Return the tests of a level: C sources or Python files."""
    if level == "c":
        found = list((ROOT / "tests/c").glob("test_*.c"))
    elif level in ("native", "ranks"):
        folder = "unit/native" if level == "native" else "ranks"
        found = list((ROOT / "tests" / folder).glob("test_*.py"))
    else:
        found = [ROOT / f"tests/parity/{name}.py" for name in PARITY_FILES.split()]
        for pattern in WHOLE if is_whole else ():
            found += (ROOT / "tests").glob(pattern)
    return sorted({path.relative_to(ROOT).as_posix() for path in found})


LEVELS = ("c", "native", "parity", "ranks")


class BuildError(Exception):
    """A step that must succeed has failed."""


def must(command: list[str], **env: str) -> None:
    done = subprocess.run(
        command, cwd=TREE, capture_output=True, text=True, env={**os.environ, **env}
    )
    if done.returncode != 0:
        raise BuildError((done.stderr or done.stdout)[-3000:])


def build(mutants: list[Mutant], programs: list[str], flags: str) -> None:
    """Build everything once, with all mutants, in a copy of the tree."""
    numbered: dict[str, list[tuple[int, Mutant]]] = {}
    for number, mutant in enumerate(mutants, 1):
        numbered.setdefault(mutant.path, []).append((number, mutant))
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = {path for path in listed.stdout.splitlines() if (ROOT / path).exists()}
    patterns = "csrc/**/*.[ch]", "tests/**/*.[ch]", "tests/**/test_*.py"
    olds = [old for pattern in patterns for old in TREE.glob(pattern)]
    for old in olds:
        if old.relative_to(TREE).as_posix() not in wanted:
            old.unlink()
    for path in wanted:
        content = (ROOT / path).read_bytes()
        if path in numbered:
            content = instrumented(content.decode(), numbered[path]).encode()
        copy = TREE / path
        if not copy.exists() or copy.read_bytes() != content:  # else make would rebuild
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
            shutil.copymode(ROOT / path, copy)
    targets = [f"build/c/plain/{Path(program).stem}" for program in programs]
    targets.append("build/c/plain/libplfake.so")
    must(["make", "BUILD=build", "-j2", f"FLAGS_plain={flags}", *targets])
    command = [sys.executable, "setup.py", "-q", "build", "--build-temp", "build/ext"]
    env = {"PACELINE_CFLAGS": FLAGS, "PACELINE_NVCC": "0"}
    must([*command, "--build-lib", str(SITE)], **env)
    shutil.copy(HERE / "switch.py", SITE / "paceline_mutants.py")


class Workplace:
    """A process that runs Python tests, and the file that selects the active mutant."""

    def __init__(self, index: int, files: list[str]) -> None:
        self._files = files  # Python tests
        self.path = BUILD / f"mutants-{index}.map"
        self.path.write_bytes(bytes(switch.N_BYTES))
        self._env = {**os.environ, "PL_MUTANTS": str(self.path)}
        os.environ["PL_MUTANTS"] = str(self.path)
        self._map = switch.open_map()
        self._forks: subprocess.Popen[str] | None = None

    def program(self, source: str, mutant: int, limit: float) -> tuple[bool, list[int]]:
        """Run a C program; return whether it passes, and the mutants it reached."""
        self._map[:] = mutant.to_bytes(4, "little") + bytes(switch.N_BYTES - 4)
        process = subprocess.Popen(
            [f"build/c/plain/{Path(source).stem}"],
            cwd=TREE,
            env=self._env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            passes = process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            passes = False
        finally:
            with contextlib.suppress(ProcessLookupError):  # also ranks that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seen = self._map[4:]
        self._map[:4] = bytes(4)
        return passes, [n for n in range(len(seen)) if seen[n]]

    def python(self, **request: Any) -> tuple[dict[str, Any], list[str]]:
        if self._forks is None:
            program = str(HERE / "forked_tests.py")
            self._forks = subprocess.Popen(
                [sys.executable, program, str(TREE), str(SITE), *self._files],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._env,
            )
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write(json.dumps(request) + "\n")
        self._forks.stdin.flush()
        runs, failed = json.loads(self._forks.stdout.readline())
        return runs, failed

    def close(self) -> None:
        if self._forks is not None:
            self._forks.communicate()


class Level:
    """The tests of a level, with the time of each and the mutants it reaches."""

    def __init__(self, name: str, files: list[str], most: float) -> None:
        self.name, self.files, self.most = name, files, most
        self.runs: dict[str, tuple[float, set[int]]] = {}

    def measure(self, place: Workplace, product: str) -> None:
        """Run all tests without a mutant, except those of files measured before."""
        kept = BUILD / f"tests-{self.name}.json"
        old = json.loads(kept.read_text()) if kept.exists() else {}
        known = {}
        for path in self.files:
            stamp = hashlib.sha256((TREE / path).read_bytes()).hexdigest() + product
            known[path] = old.get(path)
            if known[path] is None or known[path]["stamp"] != stamp:
                known[path] = {"stamp": stamp, "runs": self._measured(place, path)}
            kept.write_text(json.dumps(old | known))
            runs = known[path]["runs"]
            if "parity/ddp" in path:  # the first test runs the programs of all
                total = sum(seconds for seconds, _ in runs.values())
                reached = sorted({n for _, found in runs.values() for n in found})
                runs = dict.fromkeys(runs, (total / max(1, len(runs)), reached))
            for test, (seconds, found) in runs.items():
                self.runs[test] = (seconds, set(found))
        seconds = sum(seconds for seconds, _ in self.runs.values())
        print(f"{self.name}: {len(self.runs)} tests, {seconds:.0f} s", flush=True)

    def _measured(self, place: Workplace, path: str) -> dict[str, Any]:
        begin = time.monotonic()
        if self.name == "c":
            passes, reached = place.program(path, 0, 300)
            runs = {path: (time.monotonic() - begin, reached)}
            failed = [] if passes else [path]
        else:
            runs, failed = place.python(mutant=0, tests=[path], known={}, first=0)
        print(f"  {time.monotonic() - begin:6.1f} s  {path}", flush=True)
        for test in failed:
            print(f"  FAILS WITHOUT A MUTANT, left out: {test}", flush=True)
            runs.pop(test, None)
        return runs

    def killers(self, place: Workplace, mutant: int) -> list[str]:
        """Return the first test that fails, and those with it; [] if none does."""
        takes = {test: s for test, (s, found) in self.runs.items() if mutant in found}
        tests = sorted(takes, key=takes.__getitem__)
        total = list(itertools.accumulate(takes[test] for test in tests))
        tests = [t for t, until in zip(tests, total, strict=True) if until < self.most]
        if self.name == "c":
            for test in tests:
                limit = takes[test] * 5 + SLOWEST
                # Twice, so that load on the machine does not count as a failure.
                if not any(place.program(test, mutant, limit)[0] for _ in range(2)):
                    return [test]
            return []
        if not tests:
            return []
        ask = {"mutant": mutant, "known": takes, "first": True}
        _, failed = place.python(tests=tests, **ask)
        failed = [test for test in failed if test in takes] or failed[:1]
        return place.python(tests=failed, **ask)[1] if failed else []


def folder_of(mutant: Mutant) -> str:
    return mutant.path.rpartition("/")[0]


def chosen(mutants: list[Mutant], only: str, n: int, seed: int) -> list[Mutant]:
    """Return the mutants that match a pattern, or n of them from each folder."""
    found = [m for m in mutants if re.search(only, m.name)]
    if n == 0:
        return found
    drawn = set()
    for folder in sorted({folder_of(m) for m in found}):
        some = [m for m in found if folder_of(m) == folder]
        drawn.update(random.Random(seed).sample(some, min(n, len(some))))
    return [m for m in found if m in drawn]


def verdict(result: dict[str, list[str]], name: str) -> str:
    told = [f"{level}: {', '.join(k)}" for level, k in result.items() if k]
    return "; ".join(told) or f"equivalent: {EQUIVALENT.get(name, 'NO, it SURVIVES')}"


def table(mutants: list[Mutant], results: dict[str, dict[str, list[str]]]) -> str:
    """Return a page: the results by folder, and each mutant tried."""
    head = ["folder", "mutants", "tried", "killed", "equivalent", *LEVELS, "none"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for folder in sorted({folder_of(m) for m in mutants}):
        names = [m.name for m in mutants if folder_of(m) == folder]
        count: Counter[str] = Counter(mutants=len(names))
        for name in filter(results.__contains__, names):
            killed = [level for level, tests in results[name].items() if tests]
            kind = "equivalent" if name in EQUIVALENT else "none"
            count.update(["tried", *(["killed", *killed] if killed else [kind])])
        lines.append(f"| `{folder}` | {' | '.join(str(count[h]) for h in head[1:])} |")
    lines += ["", "| mutant | killed by |", "|---|---|"]
    for mutant in mutants:
        if mutant.name in results:
            words = f"`{mutant.name}` | {verdict(results[mutant.name], mutant.name)}"
            lines.append(f"| {words} |")
    return "\n".join(lines) + "\n"


def survey(
    wanted: list[tuple[int, Mutant]],
    levels: list[Level],
    places: list[Workplace],
    *,
    by_level: bool,
) -> Iterator[tuple[Mutant, dict[str, list[str]]]]:
    """Try each mutant; yield the tests that fail with it, by level."""
    free: queue.Queue[Workplace] = queue.Queue()
    for place in places:
        free.put(place)

    def one(number: int) -> dict[str, list[str]]:
        place = free.get()
        try:
            result: dict[str, list[str]] = {}
            for level in levels:
                result[level.name] = level.killers(place, number)
                if result[level.name] and not by_level:
                    break
            return result
        finally:
            free.put(place)

    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        done = pool.map(one, [number for number, _ in wanted])
        yield from zip([mutant for _, mutant in wanted], done, strict=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--list", action="store_true", help="only print the mutants")
    add("--only", default="", help="those whose name has this pattern")
    add("--sample", type=int, default=0, help="draw this many of each folder")
    add("--seed", type=int, default=1, help="seed for --sample")
    add("--levels", default=",".join(LEVELS), help="levels to run, in order")
    add("--by-level", action="store_true", help="run all levels, also after a kill")
    add("--quick", action="store_true", help="only some quick parity tests")
    add("--go-on", action="store_true", help="skip mutants that were tried before")
    add("--seconds", type=float, default=1e9, help="limit for a level's tests")
    add("--asan", action="store_true", help="C programs with sanitizers")
    add("--jobs", type=int, default=1, help="mutants at once")
    options = parser.parse_args()
    mutants = all_mutants()
    wanted = chosen(mutants, options.only, options.sample, options.seed)
    if options.list:
        print("\n".join(f"{m.line:4} {m.name}" for m in wanted))
        return 0
    BUILD.mkdir(parents=True, exist_ok=True)
    is_whole = not options.quick
    levels = [
        Level(name, files_of(name, is_whole=is_whole), options.seconds)
        for name in options.levels.split(",")
    ]
    print("building", flush=True)
    programs = [p for level in levels if level.name == "c" for p in level.files]
    build(mutants, programs, f"{FLAGS} {SANITIZERS}" if options.asan else FLAGS)
    files = [path for level in levels for path in level.files if path.endswith("py")]
    places = [Workplace(i, files) for i in range(options.jobs)]
    product = hashlib.sha256()
    for path in sorted({mutant.path for mutant in mutants}):
        product.update((TREE / path).read_bytes())
    for level in levels:
        level.measure(places[0], product.hexdigest())
    numbers = {mutant: number for number, mutant in enumerate(mutants, 1)}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.go_on:
        wanted = [mutant for mutant in wanted if mutant.name not in results]
    tried = [(numbers[mutant], mutant) for mutant in wanted]
    wrong = []
    for mutant, result in survey(tried, levels, places, by_level=options.by_level):
        results[mutant.name] = result
        is_killed = any(result.values())
        if is_killed == (mutant.name in EQUIVALENT):
            wrong.append(mutant.name)
        print(f"{mutant.line:4} {mutant.name}", flush=True)
        print(f"     {verdict(result, mutant.name)[:200]}", flush=True)
        RESULTS.write_text(json.dumps(results, indent=1))
        TABLE.write_text(table(mutants, results))
    for place in places:
        place.close()
    print(f"{len(tried)} mutants, {len(wrong)} survive, or are not equivalent:")
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
