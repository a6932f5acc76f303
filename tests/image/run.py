"""Build the image without a Docker engine, and check the promises of docs/image.md.

    python tests/image/run.py            base, image, checks; `make image-test` is this
    python tests/image/run.py --keep     only the checks, on the existing image

Debian's buildah builds the Dockerfile as root, in a chroot.  debootstrap makes the base
image, without torch and as minimal as the images that the page names.  The checks
(checks.py) run in separate namespaces: ports 22 and 8888 are free there, no network can
be reached, and processes that a check leaves end with the namespaces.

build/image holds the base, which is kept, and the containers, which are removed.  The
build uses pip's configuration of this machine, to find packages in the same places.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "image"
SUITE = "bookworm"
PACKAGES = "ca-certificates,python3,python3-pip"
BASE = "localhost/paceline-base"
IMAGE = "localhost/paceline"
USER_ID, GROUP_ID = 1234, 1235  # not the image's default numbers
NOT_STARTED = "sealing memfd copy: Device or resource busy"  # not the image's fault
NEEDED = ("buildah", "debootstrap", "unshare", "ssh", "ip")

# overlayfs and runc need more rights than a CI machine may have; a chroot suffices.
os.environ["STORAGE_DRIVER"] = "vfs"
os.environ["BUILDAH_ISOLATION"] = "chroot"
STORE = ["--root", str(WORK / "storage"), "--runroot", str(WORK / "run")]


def say(text: str) -> None:
    print(text, flush=True)


def run_started(command: Sequence[str], **options: Any) -> Any:
    """Run buildah, again if it could not start; its output includes its errors."""
    options = {"stderr": subprocess.STDOUT, "cwd": ROOT, "text": True, **options}
    for is_last in (False, True):
        done = subprocess.run(command, stdout=subprocess.PIPE, **options)
        said = f"{done.stdout}{done.stderr}"
        if done.returncode == 0 or NOT_STARTED not in said or is_last:
            break
        say("the container runtime could not start: trying again")
    return done


def buildah(*words: str) -> str:
    done = run_started(["buildah", *STORE, *words], stderr=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"image-test: buildah {' '.join(words)}: {done.stderr}")
    return done.stdout.strip()


def why_not() -> str:
    """Return why the checks cannot run here; "" if they can."""
    if os.geteuid() != 0:
        return "debootstrap and buildah's chroot need root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


# ---- the base ------------------------------------------------------------------------


def make_base() -> None:
    """Make the base image, from a tarball that is made once."""
    tarball = WORK / f"{SUITE}.tar"
    if not tarball.exists():
        folder = WORK / SUITE
        shutil.rmtree(folder, ignore_errors=True)
        words = ["--variant=minbase", f"--include={PACKAGES}", SUITE, str(folder)]
        with open(WORK / "debootstrap.log", "w") as log:
            subprocess.run(["debootstrap", *words], check=True, stdout=log)
        partial = tarball.with_suffix(".partial")
        subprocess.run(["tar", "-C", folder, "-cf", partial, "."], check=True)
        partial.rename(tarball)
        shutil.rmtree(folder)
    container = buildah("from", "scratch")
    folder = buildah("mount", container)
    subprocess.run(["tar", "-C", folder, "-xf", tarball], check=True)
    buildah("umount", container)
    buildah("commit", "-q", "--rm", "--format", "docker", container, BASE)


# ---- the image -----------------------------------------------------------------------


def pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine, from its files and variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    settings = {}
    for line in found.stdout.splitlines():
        name, _, value = line.partition("=")
        settings[name.split(".", 1)[1].strip(".")] = shlex.split(value)[0]
    return settings


def folders_of(settings: dict[str, str]) -> Iterator[Path]:
    """Yield the paths of this machine that pip's settings name."""
    for value in settings.values():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                # The files of an index are beside its pages.
                yield path.parent if path.name == "simple" else path


def build() -> None:
    settings = pip_settings()
    config = ConfigParser(interpolation=None)
    config["global"] = settings
    path = WORK / "pip.conf"
    with open(path, "w") as file:
        config.write(file)
    mounts = [f"{path}:/etc/pip.conf:ro"]
    mounts += [f"{folder}:{folder}:ro" for folder in {*folders_of(settings)}]
    command = ["buildah", *STORE]
    command += [
        *["bud", "--layers=false", "--pull-never", "--format", "docker"],
        *["--build-arg", f"BASE_IMAGE={BASE}"],
        *["--build-arg", f"UID={USER_ID}", "--build-arg", f"GID={GROUP_ID}"],
        *[word for mount in mounts for word in ("-v", mount)],
        *["-t", IMAGE, "."],
    ]
    log = WORK / "build.log"
    done = run_started(command)
    log.write_text(done.stdout)
    if done.returncode != 0:
        say("\n".join(done.stdout.splitlines()[-20:]))
        sys.exit(f"image-test: the build failed; its output is in {log}")
    buildah("rmi", "--prune", "--force")  # the previous image


# ---- all of it -----------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="only check an image")
    arguments = parser.parse_args()
    reason = why_not()
    if reason:
        say(f"image-test: skipped: {reason}")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    if not arguments.keep:
        make_base()
        say(f"base: {time.monotonic() - start:.0f} s")
        start = time.monotonic()
        build()
        size = buildah("images", "--format", "{{.Size}}", IMAGE)
        say(f"image: {time.monotonic() - start:.0f} s, {size}")
    try:
        container = buildah("from", "--pull-never", IMAGE)
        apart = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        checks = [sys.executable, str(ROOT / "tests" / "image" / "checks.py")]
        return subprocess.run([*apart, *checks, container, *STORE]).returncode
    finally:
        buildah("rm", "--all")


if __name__ == "__main__":
    sys.exit(main())
