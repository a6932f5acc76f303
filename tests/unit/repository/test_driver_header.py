"""driver.h declares the same as CUDA's own header, if that is installed."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = Path(sysconfig.get_path("purelib"))
FOLDERS = [
    *Path("/usr/local").glob("cuda*/include"),
    *PACKAGES.glob("nvidia/*/include"),
]

# Replace names that only we use by those of the header, and an int that stands for an
# enum by the enum.
OURS = {
    "typedef int pli_cu_result;": "typedef CUresult pli_cu_result;",
    "typedef int pli_cu_device;": "typedef CUdevice pli_cu_device;",
    "typedef uint64_t pli_cu_memory;": "typedef CUdeviceptr pli_cu_memory;",
    "int attribute": "CUdevice_attribute attribute",
    "int property": "CUpointer_attribute property",
    "(pli_cu_stream stream, int *out)": "(pli_cu_stream s, CUstreamCaptureStatus *out)",
    "(int *mode)": "(CUstreamCaptureMode *mode)",
}
PROGRAM = """
#include <cuda.h>
#include <cudaTypedefs.h>
#include "driver.h"
#define IS_THE_SAME(name, version, arguments)                                    \\
    typedef pli_cu_result(*ours_##name) arguments;                               \\
    _Static_assert(__builtin_types_compatible_p(ours_##name,                     \\
                                                PFN_##name##_v##version), #name);
PLI_DRIVER_MAP(IS_THE_SAME)
_Static_assert(PLI_CU_OUT_OF_MEMORY == CUDA_ERROR_OUT_OF_MEMORY, "");
_Static_assert(PLI_CU_NOT_INITIALIZED == CUDA_ERROR_NOT_INITIALIZED, "");
_Static_assert(PLI_CU_NO_DEVICE == CUDA_ERROR_NO_DEVICE, "");
_Static_assert(PLI_CU_NOT_READY == CUDA_ERROR_NOT_READY, "");
"""


def compiled(folder: Path, header: str, include: Path) -> str:
    (folder / "driver.h").write_text(header)
    (folder / "program.c").write_text(PROGRAM)
    paths = [f"-I{path}" for path in (include, ROOT / "csrc")]
    command = ["gcc", "-fsyntax-only", *paths, str(folder / "program.c")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.skipif(
    not any((folder / "cudaTypedefs.h").exists() for folder in FOLDERS),
    reason="CUDA's headers are not installed",
)
def test_every_prototype_is_that_of_the_version_it_asks_for(tmp_path):
    include = next(f for f in FOLDERS if (f / "cudaTypedefs.h").exists())
    header = (ROOT / "csrc/backend/driver.h").read_text()
    for ours, theirs in OURS.items():
        assert ours in header
        header = header.replace(ours, theirs)
    assert compiled(tmp_path, header, include) == ""
    wrong = header.replace("(pli_cu_memory memory)", "(int memory)")
    assert "cuMemFree" in compiled(tmp_path, wrong, include)
