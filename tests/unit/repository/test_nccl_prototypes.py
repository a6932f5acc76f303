"""Our declarations of NCCL agree with a real ``nccl.h``, if one is found."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HEADER = ROOT / "csrc" / "nccl" / "nccl_library.h"

# NCCL's header includes CUDA's and needs these names of it.
CUDA_RUNTIME = """
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
#define CUDART_VERSION 12000
#define __CUDA_BF16_TYPES_EXIST__
"""

# Reads our declarations with NCCL's types, so that both declare the same functions.
TYPES = """
#include <stddef.h>
#include <nccl.h>
#define SAME(a, b) _Static_assert(__builtin_types_compatible_p(a, b), #a " is not " #b)
#define PLI_NCCL_TYPES
typedef ncclResult_t pli_nccl_result;
typedef ncclDataType_t pli_nccl_dtype;
typedef ncclRedOp_t pli_nccl_reduction;
typedef ncclComm_t pli_nccl_comm;
typedef cudaStream_t pli_nccl_stream;
typedef ncclUniqueId pli_nccl_id;
#include "{header}"
#define OF(name, result, arguments) \\
    SAME(__typeof__(&nccl##name), result(*) arguments);
PLI_NCCL_MAP(OF)
"""

VALUES = """
#include <stddef.h>
#include <nccl.h>
#include "{header}"
#define EQUAL(a, b) _Static_assert((long)(a) == (long)(b), #a " is not " #b)
#define OF(ours, theirs, value) EQUAL(ours, theirs);
PLI_NCCL_RESULT_MAP(OF)
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
PLI_NCCL_NEW_RESULT_MAP(OF)
#endif
PLI_NCCL_DTYPE_MAP(OF)
PLI_NCCL_REDUCTION_MAP(OF)
EQUAL(PLI_NCCL_ID_BYTES, sizeof(ncclUniqueId));
EQUAL(sizeof(pli_nccl_id), sizeof(ncclUniqueId));
EQUAL(PLI_NCCL_OLDEST, NCCL_VERSION(2, 19, 0));
/* Enumerations are passed as int. */
EQUAL(sizeof(pli_nccl_result), sizeof(ncclResult_t));
EQUAL(sizeof(pli_nccl_dtype), sizeof(ncclDataType_t));
EQUAL(sizeof(pli_nccl_reduction), sizeof(ncclRedOp_t));
"""


def folders() -> list[Path]:
    """Return the folders that may have the header, first the one the user names."""
    named = os.environ.get("NCCL_INCLUDE")
    site = Path(sysconfig.get_paths()["purelib"])
    found = [Path(named)] if named else []
    found += sorted(site.glob("nvidia/*/include")) + [Path("/usr/include")]
    return [folder for folder in found if (folder / "nccl.h").exists()]


@pytest.fixture
def compiler(tmp_path):
    """Return a function that compiles a text with a real header; it returns errors."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("there is no gcc")
    if not folders():
        pytest.skip(
            "there is no nccl.h: NCCL_INCLUDE, nvidia/nccl/include, /usr/include"
        )
    for name in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
        text = CUDA_RUNTIME if name == "cuda_runtime.h" else ""
        (tmp_path / name).write_text(text)

    def compile_text(text: str) -> str:
        source = tmp_path / "check.c"
        source.write_text(text.replace("{header}", str(HEADER)))
        places = [f"-I{folder}" for folder in (tmp_path, folders()[0], ROOT / "csrc")]
        done = subprocess.run(
            [gcc, "-std=gnu11", "-fsyntax-only", *places, str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stderr if done.returncode else ""

    return compile_text


def test_functions_have_the_types_of_the_real_header(compiler):
    assert compiler(TYPES) == ""


def test_numbers_and_structs_are_those_of_the_real_header(compiler):
    assert compiler(VALUES) == ""


def test_a_wrong_declaration_would_be_found(compiler):
    wrong = "SAME(__typeof__(&ncclCommAbort), pli_nccl_result (*)(pli_nccl_comm, int));"
    assert "static assertion failed" in compiler(TYPES + wrong)
    assert "static assertion failed" in compiler(
        VALUES + "EQUAL(PLI_NCCL_AVG, ncclSum);"
    )
