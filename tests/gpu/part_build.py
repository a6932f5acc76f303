"""Build the package twice: without nvcc and, if it exists, with nvcc.

The build with nvcc contains its kernels as a fatbin; the other compiles them by NVRTC.
All other parts use the first.  Each build has its own folder under build/gpu, where a
later call finds it again unless a source has changed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kernels_library
from checks import Skip, is_fake, run_here
from part import BUILT, SITES

ROOT = Path(__file__).resolve().parents[2]
OWN = (Path(__file__).with_name("shim.c"),)
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "requirements")
TREES = ("csrc", "python")
BUILD_SECONDS = 240
MAX_EXTENSION_BYTES = 2 << 20
ARCHITECTURES = (75, 80, 90, 100, 120)


def source_files() -> list[Path]:
    files = []
    for name in (*SOURCES, *TREES):
        path = ROOT / name
        files += [path] if path.is_file() else sorted(path.rglob("*"))
    drop = (".so", ".pyc", ".o")
    return [f for f in files if f.is_file() and f.suffix not in drop]


def digest(kind: str) -> str:
    """Return the digest of a build's sources; if it differs, the build is outdated."""
    h = hashlib.sha256()
    for path in [*source_files(), *OWN]:
        h.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    for fact in (kind, sys.version, sys.executable, str(find_nvcc())):
        h.update(fact.encode() + b"\0")
    return h.hexdigest()


def find_tool(name: str) -> str | None:
    """Return the path of a CUDA program, found as setup.py finds the compiler."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [f"{home}/bin" for home in homes if home]
    path = os.pathsep.join([*places, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    return shutil.which(name, path=path)


def find_nvcc() -> str | None:
    return find_tool("nvcc")


def run_command(
    command: list[str], cwd: Path, seconds: float = BUILD_SECONDS, **env: str
) -> str:
    """Return a command's output; if it fails, raise an error with the output."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode != 0:
        words = f"{' '.join(command)}: status {done.returncode}\n{done.stdout[-6000:]}"
        raise RuntimeError(words)
    return done.stdout


def build(kind: str, has_fatbin: bool) -> dict[str, Any]:
    """Build one kind with pip if that works, else only with setup.py."""
    site, stamp = SITES[kind], BUILT / f"{kind}.stamp"
    wanted = digest(f"{kind} {has_fatbin}")
    if site.exists() and stamp.exists() and stamp.read_text() == wanted:
        return {"way": "kept from an earlier call"}
    tree = BUILT / f"tree-{kind}"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.rmtree(site, ignore_errors=True)
    stamp.unlink(missing_ok=True)
    for path in source_files():
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    env = {"PACELINE_NVCC": "1" if has_fatbin else "0"}
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    pip += ["--no-build-isolation", "--target", str(site), "."]
    begin = time.monotonic()
    try:
        run_command(pip, tree, **env)
        way = "pip"
    except RuntimeError as error:
        print(error, flush=True)
        way = "setup.py build_ext --inplace"
        run_command(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], tree, **env
        )
        shutil.copytree(tree / "python", site)
    stamp.write_text(wanted)
    return {
        "way": way,
        "nvcc": find_nvcc(),
        "build_seconds": round(time.monotonic() - begin, 1),
    }


def build_default() -> dict[str, Any]:
    """Build with nvcc; if that fails, the other parts run without its kernels."""
    try:
        return build("default", find_nvcc() is not None)
    except Exception:
        build("default", False)
        raise


def extension(kind: str) -> Path:
    [path] = (SITES[kind] / "paceline").glob("_native*.so")
    return path


def in_fresh_python(kind: str, code: str) -> str:
    """Run code in a fresh Python with one of the builds; return its output."""
    command = [sys.executable, "-c", code]
    return run_command(command, Path("/"), PYTHONPATH=str(SITES[kind]))


def sizes() -> dict[str, Any]:
    """The extension is small with all its content, without debugging information."""
    found = {}
    for kind in SITES:
        bare = BUILT / f"bare-{kind}.so"
        command = ["strip", "--strip-debug", "-o", str(bare), str(extension(kind))]
        subprocess.run(command, check=True)
        found[kind] = [extension(kind).stat().st_size, bare.stat().st_size]
    too_large = {k: n for k, n in found.items() if n[1] > MAX_EXTENSION_BYTES}
    assert not too_large, f"more than {MAX_EXTENSION_BYTES} bytes: {too_large}"
    return {"bytes_and_without_debug": found}


def imports(kinds: Iterable[str] = SITES) -> dict[str, Any]:
    """All builds import without any library of CUDA."""
    code = "import paceline, ctypes; from paceline import _native; print(_native.isa())"
    found = {kind: in_fresh_python(kind, code).strip() for kind in kinds}
    for kind in kinds:
        needed = run_command(["ldd", str(extension(kind))], ROOT)
        assert "cuda" not in needed, f"linked against CUDA:\n{needed}"
        assert "nccl" not in needed, f"linked against NCCL:\n{needed}"
    return {"isa": found}


def architectures() -> dict[str, Any]:
    if find_nvcc() is None:
        raise Skip("there is no nvcc")
    tool = shutil.which("cuobjdump") or shutil.which(
        "cuobjdump", path=str(Path(str(find_nvcc())).parent)
    )
    if tool is None:
        raise Skip("there is no cuobjdump")
    images = list((BUILT / "tree-default").rglob("*.fatbin"))
    if not images:
        raise Skip("the build keeps no file *.fatbin")
    listed = run_command([tool, "--list-elf", "--list-ptx", str(images[0])], ROOT)
    missing = [sm for sm in ARCHITECTURES if f"sm_{sm}" not in listed]
    assert not missing, f"no machine code for {missing} in\n{listed}"
    return {"fatbin_bytes": images[0].stat().st_size, "listed": listed.split()}


def has_gpu(kind: str = "default") -> dict[str, Any]:
    """torch sees a device: without one, all other checks would be skipped."""
    code = (
        "import torch; p = torch.cuda.get_device_properties(0);"
        "print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version(), p)"
    )
    if is_fake():
        raise Skip("a rehearsal")
    return {"torch": in_fresh_python(kind, code).strip()}


def driver() -> dict[str, Any]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Skip(str(error)) from None
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return {"driver_version": version.value}


def library_of(kind: str) -> Path:
    return BUILT / f"libkernels-{kind}.so"


def nvrtc_path() -> str | None:
    """Return the path of torch's NVRTC; None if only the loader may find one."""
    for place in (Path(p) for p in sys.path):
        for found in sorted(place.glob("nvidia/*/lib/libnvrtc.so.*")):
            if "builtins" not in found.name and "alt" not in found.name:
                return str(found)
    return None


def libraries() -> dict[str, Any]:
    """Build the layers below the binding as separate libraries, for part `kernels`."""
    paths = {library_of(kind): kernel_flags(kind) for kind in SITES}
    stamp, wanted = BUILT / "libraries.stamp", digest(str(paths))
    is_made = stamp.exists() and stamp.read_text() == wanted
    if not is_made or not all(path.exists() for path in paths):
        stamp.unlink(missing_ok=True)
        kernels_library.compile_libraries(paths)
        stamp.write_text(wanted)
    return {"nvrtc": nvrtc_path()}


def kernel_flags(kind: str) -> list[str]:
    """Return setup.py's flags for the kernels: its fatbin, if it made one."""
    flags = [f'-DPLI_KERNELS_FOLDER="{ROOT / "csrc" / "backend"}"']
    images = sorted((BUILT / f"tree-{kind}").rglob("*.fatbin"))
    return flags + [f'-DPLI_FATBIN_PATH="{path}"' for path in images[:1]]


CHECKS = [
    ("build_with_nvcc", build_default),
    ("build_without_nvcc", lambda: build("nvrtc", False)),
    ("sizes", sizes),
    ("imports", imports),
    ("architectures", architectures),
    ("driver", driver),
    ("has_gpu", has_gpu),
    ("libraries", libraries),
]


def run(seconds: float) -> bool:
    BUILT.mkdir(parents=True, exist_ok=True)
    return run_here(CHECKS)
