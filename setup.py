"""Builds the one extension, `paceline._native`, from the folders of csrc/.

pyproject.toml has all static metadata; this file has only what needs code.
If nvcc is found (CUDA_HOME, CUDA_PATH, the PATH, /usr/local/cuda), it compiles the
kernels for GPUs.  Otherwise the extension contains their source alone, and the NVRTC
that torch brings compiles it for the first GPU used.

Three environment variables are for developers:

PACELINE_NVCC=0     build as if there were no nvcc; =1: fail if nvcc is missing or fails
PACELINE_WERROR=1   treat warnings of the C compiler as errors
PACELINE_CFLAGS     further flags, passed last to the compiler and to the linker:
                    "-O0 -g", "-O1 -g -fsanitize=address"
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

try:
    import numpy
except ImportError:
    sys.exit("paceline: the build needs NumPy: pip install numpy")

CSRC = Path("csrc")  # setuptools runs this file from its own folder

cflags = CSRC.joinpath("compile_flags.txt").read_text().split()
cflags += ["-O3", "-g0", "-isystem", sysconfig.get_path("include")]
cflags += ["-isystem", numpy.get_include()]
if os.environ.get("PACELINE_WERROR") == "1":
    cflags.append("-Werror")
extra = shlex.split(os.environ.get("PACELINE_CFLAGS", ""))


# Tables of heap types hold functions in void pointers, which ISO C does not allow.
PYTHON_FLAGS = ["-Wno-pedantic"]


# A cubin serves later devices of its major version too; PTX serves all others.
ARCHS = (75, 80, 90, 100, 120)
PTX_ARCH = 75


def find_nvcc():
    """Return the path of nvcc, or None."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [str(Path(home, "bin")) for home in homes if home]
    for where in (*folders, None, "/usr/local/cuda/bin"):
        if found := shutil.which("nvcc", path=where):
            return found
    return None


def nvcc_command(nvcc):
    """Return the command without its output, for the devices that this nvcc knows."""

    def ask(option):
        return subprocess.run([nvcc, option], capture_output=True, text=True).stdout

    known = [a for a in ARCHS if f"compute_{a}" in ask("--list-gpu-arch").split()]
    if not known:
        raise OSError(f"{nvcc} knows none of the devices {ARCHS}")
    ptx = PTX_ARCH if PTX_ARCH in known else known[0]
    command = [nvcc, "-fatbin", "-fmad=false", "--threads", "2"]
    if "--compress-mode" in ask("--help"):
        command += ["--compress-mode=size"]
    for arch in known:
        command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    command += ["-gencode", f"arch=compute_{ptx},code=compute_{ptx}"]
    return [*command, str(CSRC / "backend" / "kernels.cu")]


def build_fatbin(folder):
    """Have nvcc compile the kernels; return the path, or None if it cannot."""
    wish = os.environ.get("PACELINE_NVCC")
    nvcc = None if wish == "0" else find_nvcc()
    words = "PACELINE_NVCC=0" if wish == "0" else "there is no nvcc"
    fatbin = Path(folder, "kernels.fatbin").absolute()
    if nvcc is not None:
        try:
            return compile_fatbin(nvcc_command(nvcc), fatbin)
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            words = f"{nvcc} failed: {said.splitlines()[-1]}"
    if wish == "1":
        sys.exit(f"paceline: {words}, but PACELINE_NVCC=1 asks for it")
    print(f"paceline: no kernels built in ({words}); NVRTC will compile them on GPUs")
    return None


def compile_fatbin(command, fatbin):
    """Run nvcc, unless the same command has made the same output before."""
    texts = [p.read_bytes() for p in sorted(CSRC.glob("backend/kernels*"))]
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True)
    all_of_it = b"\0".join([repr(command).encode(), version.stdout, *texts])
    stamp, digest = fatbin.with_suffix(".stamp"), hashlib.sha256(all_of_it).hexdigest()
    if not (fatbin.exists() and stamp.exists() and stamp.read_text() == digest):
        fatbin.parent.mkdir(parents=True, exist_ok=True)
        command = [*command, "-o", str(fatbin)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        stamp.write_text(digest)
    return fatbin


class CheckedBuild(build):
    """Exits with one sentence if the machine lacks something, before the build."""

    def run(self):
        command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
        compiler, version = shlex.split(command)[0], sysconfig.get_python_version()
        needs = "paceline: the build needs "
        if shutil.which(compiler) is None:
            sys.exit(f"{needs}a C compiler, {compiler}: apt install gcc libc6-dev")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            sys.exit(f"{needs}the headers of Python: apt install python{version}-dev")
        super().run()


class BuildInParallel(build_ext):
    """Compiles the sources of an extension side by side, and adds paceline.pth."""

    def run(self):
        super().run()
        folder = self.build_lib  # a wheel of it; an editable one is made elsewhere
        if self.editable_mode:
            folder = self.get_finalized_command("install").install_lib
        self.copy_file("python/paceline/_install/paceline.pth", folder)

    def build_extensions(self):
        compile_some = self.compiler.compile
        fatbin = None

        def own_flags(source):
            if "python" in source.parts:
                return PYTHON_FLAGS
            if source.name == "kernels_nvrtc.c" and (path := fatbin.result()):
                return [f'-DPLI_FATBIN_PATH="{path}"']
            return []

        def compile_one(source, extra_postargs, **options):
            return compile_some(
                [source],
                extra_postargs=extra_postargs + own_flags(Path(source)),
                **options,
            )

        def compile_all(sources, **options):
            nonlocal fatbin
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                fatbin = pool.submit(build_fatbin, self.build_temp)
                jobs = [pool.submit(compile_one, s, **options) for s in sources]
                return [path for job in jobs for path in job.result()]

        self.compiler.compile = compile_all
        super().build_extensions()


native = Extension(
    "paceline._native",
    sources=sorted(str(p) for p in CSRC.rglob("*.c")),
    depends=sorted(str(p) for p in CSRC.rglob("*") if p.is_file()),
    extra_compile_args=cflags + extra,
    extra_link_args=["-pthread", "-lm", "-ldl", *extra],
)


def long_description():
    """Return the README without links into the tree: an index has no such files."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"(?s)!\[[^]]*\]\([^)]*\)\n\n.*?\n\n", "", text)  # with its caption
    text = re.sub(r"\[([^]]*)\]\(#[^)]*\)", r"\1", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:)([^)#]*)[^)]*\)", r"\1 (`\2`)", text)


setup(
    license="Apache-2.0",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[native],
    cmdclass={"build": CheckedBuild, "build_ext": BuildInParallel},
)
