"""Several devices of torch on a machine without a GPU: `torch.device("gpu", 1)`.

    devices.load()    in a process that has not run a backward yet
    devices.show(2)   two devices exist from now on

They are real devices (`devices.cpp`): autograd has a thread for each, and an operation
on tensors of two of them is an error.  Their memory is the host's, and the CPU's
kernels compute, so results have the CPU's bits.

The library is built into `build/devices`, once for each torch and compiler.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline._compat import torch_core

KIND = "gpu"
MOST = 10  # N_DEVICES of operation.h

_HERE = Path(__file__).parent
_BUILD = Path(__file__).resolve().parents[3] / "build/devices"
_SOURCES = ["devices.cpp", "operation.cpp"]


class Native:
    """The loaded library; `visible` is the present number of devices."""

    library: Any = None
    visible = 0
    generators: list[torch.Generator]


native = Native()


def compiler() -> str | None:
    """Return the path of the C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def load() -> bool:
    """Load the devices into torch; return whether that worked.

    It needs a compiler, and the interface for devices of torch 2.8.
    """
    is_new = torch_core.version() >= (2, 8)
    if native.library is None and is_new and compiler() is not None:
        loaded = ctypes.CDLL(str(_built()))
        loaded.devices_stream.restype = ctypes.c_int64
        loaded.devices_set_stream.argtypes = ctypes.c_int, ctypes.c_int64
        loaded.devices_record.argtypes = ctypes.c_void_p, ctypes.c_int64
        loaded.devices_watch.argtypes = ctypes.c_void_p, ctypes.c_void_p
        loaded.devices_set_generator.argtypes = ctypes.c_int, ctypes.c_void_p
        native.library = loaded
    return native.library is not None


def show(n_devices: int) -> None:
    """Show this many devices, or none."""
    if native.library is None:
        pytest.skip("devices of torch need g++, torch 2.8, and load() before backward")
    if n_devices and not hasattr(torch, KIND):
        _introduce()
    native.visible = n_devices
    native.library.devices_show(n_devices)


def _introduce() -> None:
    """Give the devices their name and their Python side."""
    from support.devices import face

    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, face)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    native.generators = [torch.Generator(f"{KIND}:{i}") for i in range(MOST)]
    for index, generator in enumerate(native.generators):
        native.library.devices_set_generator(index, generator._cdata)


# ---- building -----------------------------------------------------------------------


def _built() -> Path:
    """Return the library; build it if none has these sources and this torch."""
    command = _command()
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, text=True, check=True
    ).stdout
    files = [file.read_bytes() for file in sorted(_HERE.glob("*.[ch]*"))]
    seed = repr((torch.__version__, version, command, files)).encode()
    path = _BUILD / f"libdevices-{hashlib.sha256(seed).hexdigest()[:16]}.so"
    _BUILD.mkdir(parents=True, exist_ok=True)
    with open(_BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = path.with_suffix(".new")
            subprocess.run([*command, "-o", str(made)], check=True)
            made.rename(path)
    return path


def _command() -> list[str]:
    """Return the command that builds the library, without the library's name."""
    torchs = Path(torch.__file__).parent
    includes = [torchs / "include", torchs / "include/torch/csrc/api/include"]
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        str(compiler()),
        *("-std=c++20", "-O1", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(flag for path in includes for flag in ("-isystem", str(path))),
        *(str(_HERE / name) for name in _SOURCES),
        *(f"-L{torchs}/lib", "-ltorch", "-ltorch_cpu", "-lc10"),
    ]
