"""Run tests/clients with all libraries, and write their table into docs/versions.md.

`make clients` runs this in build/clients, where it installs the libraries.  A row of
the table has a library's version, how it wraps a model, and the result of its tests.
Exits with 1 if a test has failed.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import run

ROOT = run.ROOT
sys.path[:0] = [str(ROOT / "tests" / "clients"), str(ROOT / "tests")]
from test_training_libraries import PROGRAMS  # noqa: E402

JUNIT = ROOT / "build" / "clients" / "clients.xml"
PAGE = ROOT / "docs" / "versions.md"
HEAD = "| library | version | how it wraps | result |\n| --- | --- | --- | --- |\n"

# Of the other files of tests/clients: how a library wraps, and its tests.
PLAIN = "as the plain module"
OTHERS = {
    "accelerate": ("`Accelerator.prepare`", "accelerate", "equal"),
    "gpytorch": ("a subclass of `DataParallel`", "gpytorch", PLAIN),
    "lightning": ("`DDPStrategy`; Fabric", "lightning|fabric", "equal"),
    "pytorch-ignite": ("`auto_model`", "ignite", "equal"),
    "skorch": ("the user's `DataParallel`", "skorch", PLAIN),
    "torchdiffeq": ("the user's `DataParallel`", "torchdiffeq", PLAIN),
    "transformers": ("`Trainer`", "transformers_trainer|trainers_own", "equal"),
    "vector-quantize-pytorch": ("the user's `DataParallel`", "quantizer", PLAIN),
    "x-transformers": ("the user's `DataParallel`", "x_transformers", PLAIN),
}


def result_of(tests: str, wanted: str) -> str:
    """Return `wanted`, the reason why tests were skipped, or how many failed."""
    found = [case for case in run.cases(JUNIT) if re.search(tests, case[0])]
    assert found, f"no tests of {tests}"
    n_failed = sum(outcome == "failed" for _, outcome, _ in found)
    if n_failed:
        return f"{n_failed} of {len(found)} tests failed"
    reasons = {reason for _, outcome, reason in found if outcome == "skipped"}
    return "; ".join(sorted(reasons)) or wanted


def table() -> str:
    packages = metadata.packages_distributions()
    rows = dict(OTHERS)
    for name, program in PROGRAMS.items():
        library = packages.get(name, [name])[0]
        rows[library] = (program.__doc__, rf"\[{name}\]", "equal")
    installed = {name for names in packages.values() for name in names}
    lines = []
    for library in sorted(rows):
        how, tests, wanted = rows[library]
        version = metadata.version(library) if library in installed else ""
        lines.append(f"| {library} | {version} | {how} | {result_of(tests, wanted)} |")
    return "\n".join(lines)


def main() -> int:
    passed = run.run_pytest(Path(sys.executable), JUNIT, ["tests/clients"])
    before, _, after = PAGE.read_text(encoding="utf-8").partition(HEAD)
    after = after.partition("\n\n")[2]
    PAGE.write_text(f"{before}{HEAD}{table()}\n\n{after}", encoding="utf-8")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
