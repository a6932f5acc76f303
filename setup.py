"""Builds the one extension, `paceline._native`, from the layers under csrc/.

What a package tool must know stands in pyproject.toml; here is only what needs code.
Two environment variables are for developers:

PACELINE_WERROR=1   warnings of the C compiler are errors
PACELINE_CFLAGS     further flags, given last to the compiler and to the linker:
                    "-O0 -g", "-O1 -g -fsanitize=address"
"""

import os
import shlex
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LAYERS = ("core", "backend", "comm", "python")
CSRC = Path("csrc")  # setuptools runs this file from its own folder

cflags = CSRC.joinpath("compile_flags.txt").read_text().split()
cflags += ["-O3", "-isystem", sysconfig.get_path("include")]
cflags += ["-isystem", numpy.get_include()]
if os.environ.get("PACELINE_WERROR") == "1":
    cflags.append("-Werror")
extra = shlex.split(os.environ.get("PACELINE_CFLAGS", ""))


# The tables of a heap type hold functions in void pointers; ISO C has no way to say so.
PYTHON_FLAGS = ["-Wno-pedantic"]


class BuildInParallel(build_ext):
    """Compiles the sources of an extension side by side."""

    def build_extensions(self):
        compile_some = self.compiler.compile

        def compile_one(source, extra_postargs, **options):
            own = PYTHON_FLAGS if Path(source).parent.name == "python" else []
            return compile_some(
                [source], extra_postargs=extra_postargs + own, **options
            )

        def compile_all(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                jobs = [pool.submit(compile_one, s, **options) for s in sources]
            return [path for job in jobs for path in job.result()]

        self.compiler.compile = compile_all
        super().build_extensions()


native = Extension(
    "paceline._native",
    sources=sorted(str(p) for layer in LAYERS for p in CSRC.glob(f"{layer}/*.c")),
    depends=sorted(str(p) for p in CSRC.rglob("*") if p.is_file()),
    extra_compile_args=cflags + extra,
    extra_link_args=["-pthread", "-lm", *extra],
)

setup(
    license="Apache-2.0",
    ext_modules=[native],
    cmdclass={"build_ext": BuildInParallel},
)
