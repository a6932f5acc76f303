"""NVIDIA's own libraries, as pip installs them, have all that Paceline uses.

They are about 200 MB each and need a network, so run this by hand::

    python -m pytest -m hand tests/unit/repository/test_nvidia_wheels.py
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.programs import run_python

ROOT = Path(__file__).resolve().parents[3]
LIBRARY_HEADER = (ROOT / "csrc" / "nccl" / "nccl_library.h").read_text()

pytestmark = pytest.mark.hand

# From the oldest that pip has of those in use to the newest; torch 2.4 brings 2.20.5.
NCCLS = ["2.19.3", "2.20.5", "2.21.5", "2.26.5", "2.27.7", "2.30.7", "2.32.3"]
# Each NVRTC, and devices to compile for; some are newer than the NVRTC.
NVRTCS = {
    "nvidia-cuda-nvrtc-cu12==12.1.105": (70, 75, 80, 86, 89, 90, 100, 120),
    "nvidia-cuda-nvrtc-cu12==12.4.127": (70, 75, 80, 86, 89, 90, 100, 120),
    "nvidia-cuda-nvrtc-cu12==12.9.86": (70, 75, 80, 86, 89, 90, 100, 120),
    "nvidia-cuda-nvrtc==13.0.88": (75, 80, 86, 89, 90, 100, 103, 120),
    "nvidia-cuda-nvrtc==13.5.37": (75, 80, 86, 89, 90, 100, 103, 120),
}

COMPILE = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backend/kernels_nvrtc.h"
int main(int n, char **words)
{
    void *image = NULL;
    const int has_large = n > 3 && atoi(words[3]);
    if (pli_nvrtc_compile(words[1], atoi(words[2]), has_large, &image) != PL_OK) {
        printf("failed: %s\\n", pl_error_message());
        return 1;
    }
    puts(memcmp(image, "\\177ELF", 4) == 0 ? "machine code" : "PTX");
    return strstr(image, ".version") == NULL && memcmp(image, "\\177ELF", 4) != 0;
}
"""


def names() -> list[str]:
    """Return the functions of the header's map."""
    text = LIBRARY_HEADER.partition("#define PLI_NCCL_MAP(X)")[2]
    text = text.partition("\n\n")[0]
    return re.findall(r"\bX\((\w+),", text)


def fetch(folder: Path, requirement: str) -> Path:
    """Unpack a wheel without installing it; return the folder."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "-d", folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{requirement} cannot be fetched: {done.stderr[-300:]}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    wheel.unlink()
    return folder


def test_the_map_is_read_whole():
    assert (names()[0], names()[-1]) == ("GetVersion", "CommDeregister")


@pytest.mark.parametrize("version", NCCLS)
def test_functions_config_and_numbers_of_nccl(tmp_path, version):
    site = fetch(tmp_path, f"nvidia-nccl-cu12=={version}")
    [library] = site.glob("nvidia/nccl/lib/libnccl.so.2")
    ask = (
        "import ctypes, sys; from paceline import _native;"
        "n = ctypes.CDLL(sys.argv[1]); print(_native.nccl_version(sys.argv[1]));"
        "print(*[w for w in sys.argv[2:] if not hasattr(n, 'nccl' + w)])"
    )
    major, minor, patch = (int(n) for n in version.split("."))
    found = run_python(ask, library, *names()).stdout.split()
    assert found == [str(major * 10000 + minor * 100 + patch)]
    prototypes = Path(__file__).with_name("test_nccl_prototypes.py")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", prototypes],
        env={**os.environ, "NCCL_INCLUDE": str(site / "nvidia/nccl/include")},
        check=True,
    )


@pytest.fixture(scope="module")
def compile_kernels(tmp_path_factory):
    """Build a program from our code that compiles the kernels with an NVRTC."""
    folder = tmp_path_factory.mktemp("compile")
    (folder / "main.c").write_text(COMPILE)
    sources = [
        ROOT / f"csrc/backend/kernels_{n}.c" for n in ("nvrtc", "image", "cache")
    ]
    sources += sorted(ROOT.glob("csrc/core/*.c"))
    flags = (ROOT / "csrc/compile_flags.txt").read_text().split()
    command = ["gcc", *flags, f"-I{ROOT}/csrc", "-O1", "-o", folder / "compile"]
    command += [folder / "main.c", *sources, "-pthread", "-ldl", "-lm"]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder / "compile"


@pytest.mark.parametrize("requirement", NVRTCS)
def test_kernels_compile_for_every_device(tmp_path, requirement, compile_kernels):
    site = fetch(tmp_path, requirement)
    paths = site.glob("nvidia/*/lib/libnvrtc.so.*")
    found = [path for path in paths if not re.search("builtins|alt", path.name)]
    given = {"XDG_CACHE_HOME": tmp_path / "cache", "LD_LIBRARY_PATH": found[0].parent}
    env = {**os.environ, **given}
    said = {}
    for compute in NVRTCS[requirement]:
        for has_large in ("0", "1"):
            done = subprocess.run(
                [compile_kernels, found[0], str(compute), has_large],
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            said[compute, has_large] = (done.returncode, done.stdout.strip())
    print(requirement, {k: words for k, (_, words) in said.items()})
    assert {k: v for k, v in said.items() if v[0] != 0} == {}
    assert said[90, "1"] == (0, "machine code")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_no_kernel_spills_but_those_that_are_known(tmp_path):
    """Bytes of a thread's registers that nvcc reports as spilled to memory."""
    known = {"pl_sum": 8}  # on sm_100 and sm_120, outside of its loop
    archs = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
    command = ["nvcc", "-fatbin", "-fmad=false", "-Xptxas", "-v", "-o", tmp_path / "k"]
    command += [f"-gencode=arch=compute_{a[3:]},code={a}" for a in archs]
    done = subprocess.run(
        [*command, ROOT / "csrc/backend/kernels.cu"],
        capture_output=True,
        text=True,
        check=True,
    )
    text = done.stdout + done.stderr
    rows = re.findall(
        r"Function properties for (\S+)\n.*?(\d+) bytes spill stores", text
    )
    assert len(rows) == len(archs) * len({name for name, _ in rows}) > 0
    print(len(rows), "kernels;", [row for row in rows if row[1] != "0"])
    assert [row for row in rows if int(row[1]) > known.get(row[0], 0)] == []
