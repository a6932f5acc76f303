"""Importing does no work, and wrapping a model changes no global of torch."""

import importlib.metadata
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import paceline
import pytest
import torch
from paceline import _native
from support.programs import run_python

FOREIGN = ("torch", "cuda", "nccl", "nvrtc", "c10", "stdc++", "mpi", "python")


def run(code, env=None):
    done = run_python(code, env=env, cwd="/")
    assert done.stderr == ""
    return done.stdout.strip()


HEAVY = "[m for m in ('torch', 'numpy', 'cloudpickle') if m in sys.modules]"


@pytest.mark.parametrize("env", [None, {}], ids=["own", "empty"])
def test_importing_the_package_imports_neither_torch_nor_numpy(env):
    assert run(f"import sys, paceline; print({HEAVY})", env) == "[]"


def test_asking_for_the_errors_and_the_version_imports_no_torch():
    code = f"""
import sys
from paceline import MismatchError, PeerError, PeerTimeoutError, __version__
import paceline
dir(paceline), repr(paceline), paceline._native.isa()
print({HEAVY})
"""
    assert run(code, {}) == "[]"


def test_importing_starts_no_thread_and_opens_no_file():
    code = """
import os
def count(what): return len(os.listdir(f"/proc/self/{what}"))
before = count("task"), count("fd")
import paceline
print((count("task"), count("fd")) == before)
"""
    assert run(code, {}) == "True"


def test_using_a_name_imports_torch_then_and_in_an_empty_environment():
    code = """
import sys, paceline
paceline.save
print("torch" in sys.modules, paceline.DistributedDataParallel.__module__)
"""
    assert run(code, {}) == "True paceline"


def test_everything_can_be_imported_by_star():
    code = "from paceline import *; print(DistributedDataParallel.__name__, load, save)"
    assert run(code).startswith("DistributedDataParallel <function load")


# ---- needs of the native module -----------------------------------------------------


def test_the_native_module_needs_the_c_library_alone():
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not there")
    command = ["readelf", "-d", _native.__file__]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", words)
    assert any(name.startswith("libc.") for name in needed), needed
    assert not [name for name in needed if any(word in name for word in FOREIGN)]


def test_no_cuda_library_is_loaded_by_wrapping(tmp_path):
    if torch.version.cuda is not None:
        pytest.skip("this torch loads CUDA by itself")
    code = f"""
import torch, torch.distributed as dist, paceline
store = dist.FileStore({str(tmp_path / "store")!r}, 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
paceline.DistributedDataParallel(torch.nn.Linear(1, 1))
maps = open("/proc/self/maps").read()
print([word for word in ("libcuda", "libnccl", "libnvrtc") if word in maps])
dist.destroy_process_group()
"""
    assert run(code) == "[]"


# ---- globals ------------------------------------------------------------------------


def globals_of_torch():
    """Return the globals that a library could change without notice, by name."""
    state = {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "mkldnn": torch.backends.mkldnn.enabled,
        "print": str(torch._tensor_str.PRINT_OPTS),
        "seed": torch.initial_seed(),
        "random": torch.random.get_rng_state().sum().item(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "DDP": torch.nn.parallel.DistributedDataParallel,
        "DDP.forward": torch.nn.parallel.DistributedDataParallel.forward,
        "DDP names": sorted(vars(torch.nn.parallel.DistributedDataParallel)),
        "active": torch.nn.parallel.DistributedDataParallel._active_ddp_module,
        "Module names": sorted(vars(torch.nn.Module)),
        "Tensor names": sorted(vars(torch.Tensor)),
        "module hooks": len(torch.nn.modules.module._global_forward_hooks),
        "dynamo": "torch._dynamo" in sys.modules,
        "python random": hash(random.getstate()),
        "numpy random": np.random.get_state()[1].sum(),
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
        "excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "path": list(sys.path),
    }
    state["python threads"] = threading.active_count()
    state["affinity"] = os.sched_getaffinity(0)
    return state


def test_wrapping_and_training_change_no_global_of_torch(alone):
    before = globals_of_torch()
    model = torch.nn.Linear(3, 2)
    after_model = globals_of_torch()
    wrapper = paceline.DistributedDataParallel(model)
    wrapped = globals_of_torch()
    x = torch.ones(2, 3)
    wrapper(x).sum().backward()
    with wrapper.no_sync():
        wrapper(x).sum().backward()
    wrapper.state_dict()
    del wrapper
    trained = globals_of_torch()
    before["random"] = after_model["random"]  # Linear draws numbers
    changed = [k for s in (wrapped, trained) for k in before if s[k] != before[k]]
    assert changed == []


# ---- names --------------------------------------------------------------------------


def test_every_public_name_is_there_listed_and_documented():
    assert dir(paceline) == sorted([*paceline.__all__, "callbacks", "data"])
    for name in paceline.__all__:
        words = getattr(paceline, name).__doc__
        assert name == "__version__" or ">>>" in words, name
    assert paceline.__version__ == importlib.metadata.version("paceline")


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="'paceline' has no attribute 'no_such'"):
        paceline.no_such  # noqa: B018
    with pytest.raises(AttributeError, match="'DataParalell': did you mean DataParall"):
        paceline.DataParalell  # noqa: B018


def test_errors_are_the_kinds_that_callers_catch():
    assert issubclass(paceline.PeerError, RuntimeError)
    assert issubclass(paceline.PeerTimeoutError, (paceline.PeerError, TimeoutError))
    assert issubclass(paceline.MismatchError, RuntimeError)
    assert paceline.PeerError.__module__ == "paceline"


def test_the_stubs_name_what_the_native_module_has():
    stub = Path(paceline.__file__).with_name("_native.pyi").read_text()
    public = [name for name in dir(_native) if not name.startswith("_")]
    declared = re.findall(
        r"^(?:def |class |from .* import )?(\w+)(?:[(:]| as )", stub, re.MULTILINE
    )
    assert set(public) - set(declared) == set()
