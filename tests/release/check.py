"""Check the files of `make wheels` as a user who installs them sees them.

    python tests/release/check.py        `make release-check` is this, after the wheels
    python tests/release/check.py --tag v0.1.0

Version, changelog and tag must agree.  Each file must have its licence.  Each wheel for
this machine must load in a clean environment of its Python.  The wheel for the current
Python is installed with its dependencies, and must run the README's first program and
`paceline doctor`.  Finally the README's two commands run from the sdist: `make demo` in
its short form, and the C tests of `make test` (--whole for all tests).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from wheels import DIST, ROOT, WORK, make_environment, run, say

LOAD = "import sys; sys.path.insert(0, sys.argv[1]); import paceline._native"


# ---- contents of the files -----------------------------------------------------------


def check_version(tag: str | None) -> str:
    """Compare the versions of pyproject, changelog, files and tag; return it."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.*?)"', text, re.MULTILINE)
    if found is None:
        sys.exit("pyproject.toml has no version")
    version = found[1]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[?(.*?)\]?(?: - .*)?$", changelog, re.MULTILINE)
    heading = "Unreleased" if ".dev" in version else version
    if newest is None or newest[1] != heading:
        sys.exit(f"version {version}: CHANGELOG.md must begin with ## {heading}")
    if tag is not None and tag != f"v{version}":
        sys.exit(f"tag {tag}, but pyproject.toml has version {version}")
    strange = [p.name for p in DIST.iterdir() if f"paceline-{version}" not in p.name]
    if strange:
        sys.exit(f"not of version {version}: {', '.join(strange)}")
    return version


def check_licences() -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    for path in sorted(DIST.iterdir()):
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                texts = [archive.read(n) for n in archive.namelist() if "LICENSE" in n]
        else:
            with tarfile.open(path) as tar:
                members = [m for m in tar.getmembers() if m.name.endswith("/LICENSE")]
                files = [tar.extractfile(m) for m in members]
                texts = [f.read() for f in files if f is not None]
        if texts != [licence]:
            sys.exit(f"{path.name} does not have the tree's LICENSE, once")


# ---- use of the files ----------------------------------------------------------------


def load_wheel(python: Path, wheel: Path) -> None:
    """Load the extension of a wheel in an environment with only NumPy."""
    folder = WORK / "loaded" / wheel.stem
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    run(python, "-c", LOAD, folder)


def install_wheel(wheel: Path) -> None:
    """Install a wheel with its dependencies, and use it as the README does."""
    folder = WORK / "installed"
    shutil.rmtree(folder, ignore_errors=True)
    python = make_environment(sys.executable, folder, wheel)
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    program = folder / "train.py"
    program.write_text(blocks[0].partition("```")[0])
    say(run(python, program, cwd=folder).rstrip())
    doctor = run(folder / "bin" / "paceline", "doctor", cwd=folder)
    say(doctor.rstrip().splitlines()[-1])


def run_readme(whole: bool) -> None:
    """Run the README's two commands in the unpacked sdist."""
    folder = WORK / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    clean = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL"}}
    make = ["make", "--no-print-directory", f"PYTHON={sys.executable}"]
    for target in (["demo", "DEMO_FLAGS=--quick"], ["test" if whole else "c-test"]):
        said = run(*make, *target, cwd=tree, env=clean)
        say(f"make {' '.join(target)}: {said.rstrip().splitlines()[-1]}")


def main() -> None:
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tag", help="the tag of the release, as v0.1.0")
    parser.add_argument("--whole", action="store_true", help="all of make test")
    args = parser.parse_args()
    wheels = sorted(DIST.glob(f"*{os.uname().machine}.whl"))
    if not wheels:
        parser.error(f"no wheel for this machine in {DIST}: make wheels")
    say(f"version {check_version(args.tag)}")
    check_licences()
    for wheel in wheels:
        version = re.sub(r".*-cp3(\d+)-cp3\d+(t?)-.*", r"3.\1\2", wheel.name)
        load_wheel(WORK / f"python{version}" / "bin" / "python", wheel)
        say(f"{wheel.name} loads")
    own = f"-cp3{sys.version_info.minor}-"
    install_wheel(next(w for w in wheels if own in w.name))
    run_readme(args.whole)
    say(f"can be uploaded: {DIST}")


if __name__ == "__main__":
    main()
