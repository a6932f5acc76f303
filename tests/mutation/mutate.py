"""Break the GPU path in one place at a time: some test on the fakes must see it.

Run by hand, from anywhere, with the Python that has torch::

    python tests/mutation/mutate.py                 # all, on two copies of the tree
    python tests/mutation/mutate.py --list          # what there is to break
    python tests/mutation/mutate.py --only deferred_copies --jobs 1
    python tests/mutation/mutate.py --only drain --show 9     # why did the test fail?
    python tests/mutation/mutate.py --write         # all, and the table in README.md
    python tests/mutation/mutate.py --write --only device     # those rows alone

Each mutant (mutants.py) is built in a copy of the tree, and the tests on the fakes are
run until one fails, the one that failed for it last time first.  The exit status is 1
where a mutant survives that equivalent.py does not name with its reason, or where it
names one that is killed.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy
from equivalent import EQUIVALENT
from mutant import ROOT, Mutant
from mutants import all_mutants

README = Path(__file__).parent / "README.md"


def includes_fake(path: Path) -> bool:
    """Tell whether a C test, or a header of its, includes the fakes."""
    names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
    if "fake/fake.h" in names:
        return True
    return any(includes_fake(path.parent / n) for n in names if "/" not in n)


C_TESTS = sorted(
    path.stem
    for path in (ROOT / "tests/c").glob("test_*.c")
    if includes_fake(path) and not path.stem.startswith("test_fake_")
)
PY_TESTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("unit", "parity", "ranks")
    for path in (ROOT / "tests" / folder).rglob("test_*.py")
    if re.match(r"test_(cuda|native_device|device_group)", path.name)
)
# What replicas on GPUs do: files of their own, and others that make simulated GPUs.
DP_TESTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tests/parity/dp").glob("test_data_parallel_*.py")
    if "_gpus" in path.name or re.search(r"\((wrap|n_gpus|row)\b", path.read_text())
)
SLOWEST = 20  # seconds that a test may take longer than unharmed


class BuildError(Exception):
    """A mutant that does not compile shows nothing: the pattern is wrong."""


def run(
    command: list[str], cwd: Path, limit: float, env: dict[str, str], said: Path
) -> int:
    """Run a command, its output into a file; its status, 124 where it took too long."""
    with said.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        with said.open("a") as output:
            output.write(f"killed: it took longer than {limit:.0f} s\n")
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):  # ranks that it started, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def must(command: list[str], cwd: Path) -> None:
    """Run a command that has to succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError((done.stderr or done.stdout)[-2000:])


@dataclass
class Workplace:
    """A copy of the tree, with what is built from it."""

    root: Path
    n_shown: int = 0  # lines of what a test says that kills
    seconds: dict[str, float] = field(default_factory=dict)  # of each test, unharmed
    # Of each Python test: how long it takes, and which functions it calls.
    python_tests: dict[str, tuple[float, list[str]]] = field(default_factory=dict)
    forks: subprocess.Popen[str] | None = None  # what runs tests of Python's mutants

    @property
    def said(self) -> Path:
        """Where the output of the last test is."""
        return self.root / "build/said.txt"

    @property
    def site(self) -> Path:
        """Where the package is, built from this copy."""
        return self.root / "build/site"

    def build_c(self, test: str) -> None:
        """Build one C test."""
        must(
            ["make", "BUILD=build", "FLAGS_plain=-O1 -w", self.program(test)], self.root
        )

    @staticmethod
    def program(test: str) -> str:
        """Where the program of a C test is."""
        return f"build/c/plain/{test}"

    def compile(self, source: str) -> None:
        """Compile one source of the extension."""
        out = self.object(source)
        out.parent.mkdir(parents=True, exist_ok=True)
        flags = (self.root / "csrc/compile_flags.txt").read_text().split()
        include = ["-isystem", sysconfig.get_path("include"), "-isystem"]
        flags += ["-w", "-O1", "-fPIC", *include, numpy.get_include()]
        flags += ['-DPLI_FATBIN_PATH="tests/c/fake/fake.fatbin"']
        must(["gcc", *flags, "-c", source, "-o", str(out)], self.root)

    def object(self, source: str) -> Path:
        """Where the object of a source of the extension is."""
        return self.root / "build/ext" / f"{source}.o"

    def link(self) -> None:
        """Link the extension, beside the package's Python."""
        package = self.site / "paceline"
        if not package.exists():
            shutil.copytree(self.root / "python/paceline", package)
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        objects = [str(path) for path in (self.root / "build/ext").rglob("*.o")]
        must(
            ["gcc", "-shared", *objects, "-o", str(package / f"_native{suffix}")]
            + ["-pthread", "-lm", "-ldl"],
            self.root,
        )

    def install(self, source: str) -> None:
        """Bring one source into the package: compiled, or as it is."""
        if source.endswith(".py"):
            package = self.site / Path(source).relative_to("python")
            shutil.copyfile(self.root / source, package)
            return
        self.compile(source)
        self.link()

    def build_all(self, tests: list[str]) -> None:
        """Build everything, unharmed; the installed extension serves Python alone."""
        programs = [self.program(test) for test in tests if not test.endswith(".py")]
        programs = programs or ["build/c/plain/libplfake.so"]
        must(["make", "BUILD=build", "-j2", "FLAGS_plain=-O1 -w", *programs], self.root)
        if all(test in DP_TESTS for test in tests):
            package = self.site / "paceline"
            shutil.copytree(self.root / "python/paceline", package)
            shutil.copy(Path(find_spec("paceline._native").origin), package)
            return
        if any(test.endswith(".py") for test in tests):
            sources = [
                path.relative_to(self.root).as_posix()
                for path in (self.root / "csrc").rglob("*.c")
            ]
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                list(pool.map(self.compile, sources))
            self.link()

    def passes(self, test: str) -> bool:
        """Tell whether a test passes, as things are."""
        limit = self.seconds.get(test, 300) * 3 + SLOWEST
        if test.endswith(".py"):
            command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", test]
            command += ["-p", "no:cacheprovider"]
            return (
                run(
                    command, self.root, limit, {"PYTHONPATH": str(self.site)}, self.said
                )
                == 0
            )
        return run([self.program(test)], self.root, limit, {}, self.said) == 0

    def first_failing(self, tests: list[str]) -> str | None:
        """Return the first of some Python tests that fails; they run in one process."""
        if self.forks is None:
            program = str(Path(__file__).with_name("forked_tests.py"))
            self.forks = subprocess.Popen(
                [sys.executable, "-B", program, str(self.root), str(self.site)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.forks.stdin is not None
        assert self.forks.stdout is not None
        known = {test: seconds for test, (seconds, _) in self.python_tests.items()}
        self.forks.stdin.write(json.dumps([tests, known]) + "\n")
        self.forks.stdin.flush()
        runs, failed = json.loads(self.forks.stdout.readline())
        if not known:
            for test in failed:
                print(f"  FAILS WITHOUT A MUTANT, left out: {test}", flush=True)
                runs.pop(test, None)
            self.python_tests.update(runs)
        return failed[0] if failed else None

    def close(self) -> None:
        """End what runs tests."""
        if self.forks is not None:
            self.forks.communicate()

    def show(self) -> None:
        """Print the end of what the last test said."""
        lines = self.said.read_text(errors="replace").splitlines()
        for line in lines[max(len(lines) - self.n_shown, 0) :]:
            print(f"    {line}", flush=True)

    def measure(self, tests: list[str]) -> None:
        """Run all tests unharmed, and note how long each takes."""
        if all(test in DP_TESTS for test in tests):
            self.first_failing(tests)
            seconds = sum(seconds for seconds, _ in self.python_tests.values())
            print(f"  {seconds:6.1f} s  {len(self.python_tests)} tests", flush=True)
            self.seconds.update(dict.fromkeys(tests, 0.0))
            return
        for test in tests:
            begin = time.monotonic()
            if not self.passes(test):
                self.show()
                print(f"  FAILS WITHOUT A MUTANT, left out: {test}", flush=True)
                continue
            self.seconds[test] = time.monotonic() - begin
            print(f"  {self.seconds[test]:6.1f} s  {test}", flush=True)

    def killer_of(
        self, mutant: Mutant, tests: list[str], last: str | None
    ) -> str | None:
        """Return the first test that a mutant fails; None: it survives them all."""
        path = self.root / mutant.path
        whole = path.read_text()
        path.write_text(mutant.applied_to(whole))
        if mutant.path.endswith(".py"):
            try:
                self.install(mutant.path)
                return self._python_killer(mutant, last)
            finally:
                path.write_text(whole)
                self.install(mutant.path)
        linked = False
        try:
            for test in tests:
                if test.endswith(".py") and not linked:
                    self.install(mutant.path)
                    linked = True
                elif not test.endswith(".py"):
                    self.build_c(test)
                # Twice, so that a machine under load is not taken for a test.
                if not self.passes(test) and not self.passes(test):
                    self.show()
                    return test
            return None
        finally:
            path.write_text(whole)
            if linked:
                self.compile(mutant.path)

    def _python_killer(self, mutant: Mutant, last: str | None) -> str | None:
        """Return the file of the first test that fails, twice; None: there is none.

        Only tests that call the mutant's function are run.
        """
        function = f"{Path(mutant.path).name} {mutant.function.split('.')[-1]}"
        tests = [test for test, run in self.python_tests.items() if function in run[1]]
        likely = [test for test in tests if test.partition("::")[0] == last]
        for some in filter(None, (likely, tests)):
            failed = self.first_failing(some)
            if failed is not None and (
                self.first_failing([failed]) or self.first_failing(some)
            ):
                return failed.partition("::")[0]
        return None


def last_killers() -> dict[str, str]:
    """Return what the table says: which test killed which mutant."""
    path, found = "", {}
    lines = README.read_text().splitlines() if README.exists() else []
    for line in lines:
        if line.startswith("### "):
            path = line[4:].strip("`")
        row = re.fullmatch(r"\| (.*?) \| (.*?) \| `(.*)` \| (.*) \|", line)
        if row is not None:
            words = row[3].replace("\\|", "|")
            found[f"{path} {row[1]}(): {row[2]}: {words}"] = row[4]
    return found


def tests_for(mutant: Mutant, seconds: dict[str, float], last: str | None) -> list[str]:
    """Return the tests to run, the likeliest first, then the quickest."""
    tests = sorted(seconds, key=lambda test: (test.endswith(".py"), seconds[test]))
    if mutant.path.endswith(".py"):
        tests = [test for test in tests if test in DP_TESTS]
    elif mutant.path.startswith("csrc/python/"):
        tests = [test for test in tests if test.endswith(".py")]
    return sorted(tests, key=lambda test: test != last)


def table(results: dict[Mutant, str | None]) -> str:
    """Return the text of README.md: what was seen now, and before of all others."""
    seen = last_killers()
    for mutant, killer in results.items():
        excuse = EQUIVALENT.get(mutant.name)
        survives = "SURVIVES" if excuse is None else f"equivalent: {excuse}"
        seen[mutant.name] = killer or survives
    mutants = all_mutants()
    n_killed = sum(seen.get(m.name, "").startswith("test") for m in mutants)
    n_left = sum(m.name not in seen for m in mutants)
    lines = [
        "# Mutants of the GPU path",
        "",
        "Each row is one change to one place of the sources, and the first test on",
        "the fakes that failed with it (`python tests/mutation/mutate.py --write`).",
        f"{len(mutants)} mutants, {n_killed} killed, {n_left} not tried, which have",
        "no row; what is called equivalent changes nothing that a program could see,",
        "for the reason given (`equivalent.py`).",
    ]
    path = ""
    for mutant in mutants:
        if mutant.name not in seen:
            continue
        if mutant.path != path:
            path = mutant.path
            lines += ["", f"### `{path}`", ""]
            lines += ["| function | mutation | at | killed by |"]
            lines += ["| --- | --- | --- | --- |"]
        words = mutant.name.split(f": {mutant.operator}: ", 1)[1].replace("|", "\\|")
        result = seen[mutant.name]
        lines.append(
            f"| {mutant.function} | {mutant.operator} | `{words}` | {result} |"
        )
    return "\n".join(lines) + "\n"


def copies(folder: Path, n: int, tests: list[str], n_shown: int) -> list[Workplace]:
    """Return n copies of the tree, built, in a folder."""
    skipped = shutil.ignore_patterns(
        ".git", "build", ".venv*", "__pycache__", "*.egg-info"
    )
    first = Workplace(folder / "0", n_shown)
    shutil.copytree(ROOT, first.root, ignore=skipped, symlinks=True)
    print("building", flush=True)
    first.build_all(tests)
    first.measure(tests)
    known = n_shown, first.seconds, first.python_tests
    others = [Workplace(folder / str(i), *known) for i in range(1, n)]
    for other in others:
        shutil.copytree(first.root, other.root, symlinks=True)
    return [first, *others]


def survey(
    mutants: list[Mutant], places: list[Workplace], *, write: bool, is_whole: bool
) -> dict[Mutant, str | None]:
    """Try each mutant; returns who killed it.

    What survives some of the tests alone is not written: others may have killed it.
    """
    free: queue.Queue[Workplace] = queue.Queue()
    for place in places:
        free.put(place)
    last = last_killers()
    results: dict[Mutant, str | None] = {}
    written: dict[Mutant, str | None] = {}

    def one(mutant: Mutant) -> str | None:
        place = free.get()
        try:
            killer = last.get(mutant.name)
            tests = tests_for(mutant, place.seconds, killer)
            return place.killer_of(mutant, tests, killer)
        except BuildError as error:
            raise BuildError(f"{mutant.name}: does not build: {error}") from error
        finally:
            free.put(place)

    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        for mutant, killer in zip(mutants, pool.map(one, mutants), strict=True):
            results[mutant] = killer
            print(
                f"{killer or 'SURVIVES':<28} {mutant.line:4} {mutant.name}", flush=True
            )
            if write and (killer or is_whole or mutant.name in EQUIVALENT):
                written[mutant] = killer
                README.write_text(table(written))
    return results


def complaints(results: dict[Mutant, str | None]) -> list[str]:
    """Return what is wrong: survivors, and excuses that are none."""
    wrong = []
    for mutant, killer in results.items():
        if killer is None and mutant.name not in EQUIVALENT:
            wrong.append(f"survives: {mutant.path}:{mutant.line}: {mutant.name}")
        if killer is not None and mutant.name in EQUIVALENT:
            wrong.append(f"is no equivalent, {killer} fails: {mutant.name}")
    return wrong


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the mutants alone")
    parser.add_argument("--only", default="", help="those whose name has this pattern")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree")
    parser.add_argument("--write", action="store_true", help="write README.md")
    parser.add_argument("--tests", default="", help="tests whose name has this pattern")
    parser.add_argument(
        "--show", type=int, default=0, help="last lines of what a failing test says"
    )
    options = parser.parse_args()
    mutants = [m for m in all_mutants() if re.search(options.only, m.name)]
    if options.list:
        print("\n".join(f"{m.line:4} {m.name} -> {m.replacement}" for m in mutants))
        return 0
    wanted = C_TESTS + PY_TESTS + DP_TESTS
    if all(mutant.path.endswith(".py") for mutant in mutants):
        wanted = DP_TESTS
    tests = [t for t in wanted if re.search(options.tests, t)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        places = copies(Path(folder), options.jobs, tests, options.show)
        results = survey(
            mutants, places, write=options.write, is_whole=not options.tests
        )
        for place in places:
            place.close()
        wrong = complaints(results)
        failing = set(tests) - set(places[0].seconds)
        wrong += [f"fails without a mutant: {test}" for test in sorted(failing)]
    n_killed = sum(killer is not None for killer in results.values())
    print("\n".join(wrong))
    print(f"{len(results)} mutants, {n_killed} killed, {len(wrong)} complaints")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
