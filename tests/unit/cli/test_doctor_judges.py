"""What the doctor makes of readings, most of which this machine cannot have."""

import dataclasses
import itertools
import re
from functools import partial
from pathlib import Path

import pytest
from paceline import _cgroup
from paceline._cli.doctor import gpus, links, memory, software, system
from paceline._cli.doctor.finding import GIB, MIB, Status, count, size
from paceline._cli.doctor.table import CHECKS

ROOT = Path(__file__).parents[3]


def assert_finding(finding, status, *words):
    """Check the status, and that each of some words is somewhere in the finding."""
    text = f"{finding.found}\n{finding.advice}"
    assert finding.status is Status(status), text
    assert all(word in text for word in words), text
    assert finding.found
    assert finding.advice or status == "ok"


def judged(judge, make, *rows):
    """Return a test of rows: changes of a reading, the status and words that follow."""

    @pytest.mark.parametrize("row", rows, ids=lambda row: row[1])
    def test(row):
        changes, status, *words = row
        assert_finding(judge(make(**changes)), status, *words)

    return test


# ---- software -----------------------------------------------------------------------

test_python_is_compared_with_what_is_supported = judged(
    software.judge_python,
    partial(
        software.Python,
        version=(3, 12, 1),
        implementation="CPython",
        executable="/usr/bin/python3",
        system="Linux 6.1 (x86_64, glibc 2.36)",
    ),
    ({}, "ok", "CPython 3.12.1", "Linux 6.1", "/usr/bin/python3"),
    ({"version": (3, 10, 0)}, "ok"),
    ({"version": (3, 14, 0)}, "ok"),
    ({"version": (3, 9, 18)}, "problem", "too old", "3.10 to 3.14"),
    ({"version": (3, 15, 0)}, "warning", "newer than all that were tried"),
    ({"implementation": "PyPy"}, "warning", "PyPy"),
    ({"is_free_threaded": True}, "warning", "global interpreter lock"),
)

test_an_extension_that_does_not_load_is_a_problem = judged(
    software.judge_extension,
    partial(software.Extension, version="1.2", processor="x86_64"),
    ({"isa": "avx2"}, "ok", "paceline 1.2", "by avx2"),
    ({"isa": "plain"}, "warning", "no vector instructions", "x86_64"),
    ({"error": "ImportError: GLIBC_2.38"}, "problem", "GLIBC_2.38", "pip install"),
    ({"isa_error": "ValueError: 'x'"}, "problem", "'x'", "Unset PACELINE_ISA"),
)

IS_29 = {"version": "2.9.0"}
test_a_torch_that_is_missing_or_old_is_a_problem = judged(
    software.judge_torch,
    software.Torch,
    ({"version": "2.13.0+cpu", "build": "CPU"}, "ok", "torch 2.13.0+cpu", "CPU"),
    ({"version": "2.4.0"}, "ok"),
    ({"version": "3.0.0"}, "ok"),
    ({"version": "2.3.1"}, "problem", "older than 2.4", "torch>=2.4"),
    ({"version": "1.13.1"}, "problem", "older than 2.4"),
    ({"error": "ModuleNotFoundError: x"}, "problem", "x", "pip install"),
    ({**IS_29, "error": "OSError: libx"}, "problem", "torch 2.9.0", "libx", "imported"),
    ({**IS_29, "attach_error": "AttributeError: y"}, "problem", "y"),
    ({**IS_29, "missing": ("numpy: z",)}, "problem", "numpy: z"),
    ({**IS_29, "has_groups": False}, "problem", "torch.distributed"),
    ({"version": "unknown"}, "ok"),
)

cores = partial(system.Cores, n_machine=8, n_affinity=8, quota=None)


def threads(n_threads=8, n_bound=None, binding=(), **of_cores):
    found = cores(**of_cores)
    n_bound = found.n_affinity if n_bound is None else n_bound
    return software.Threads(n_threads, found, n_bound, binding)


BINDING = {"binding": ("OMP_PROC_BIND=true",)}
test_threads_are_compared_with_cores_and_binding = judged(
    software.judge_threads,
    threads,
    ({}, "ok", "8 threads"),
    ({"n_threads": 1}, "ok", "1 thread"),
    ({"n_threads": 9}, "warning", "OMP_NUM_THREADS=8"),
    ({"quota": 2.5}, "warning", "2.5 cores", "OMP_NUM_THREADS=2"),
    ({"quota": 0.5}, "warning", "OMP_NUM_THREADS=1"),
    ({"n_threads": 2, "quota": 2.0}, "ok"),
    ({"n_bound": 1, **BINDING}, "warning", "OMP_PROC_BIND=true", "bound to 1 of 8 cor"),
    ({"binding": ("OMP_PLACES=cores",)}, "ok", "OMP_PLACES=cores"),
)


def environment(**variables):
    return software.look_environment({"HOME": "/root", "MY_TOKEN": "x", **variables})


test_names_that_are_misspelt_and_wrong_values_are_found = judged(
    software.judge_environment,
    environment,
    ({}, "ok", "nothing is set"),
    ({"OMP_NUM_THREADS": "4"}, "ok", "OMP_NUM_THREADS=4"),
    ({"NCCL_P2P_DISABLE": "1"}, "ok", "NCCL_P2P_DISABLE=1"),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, "ok", "CUDA_VISIBLE_DEVICES=0,1"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "x:y"}, "ok", "PYTORCH_CUDA_ALLOC_CONF=x:y"),
    ({"PACELINE_TIMOUT": "3"}, "warning", "did you mean PACELINE_TIMEOUT?"),
    ({"PACELINE_FAST": "1"}, "warning", "no variable PACELINE_FAST"),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "warning", "slow"),
    ({"CUDA_LAUNCH_BLOCKING": "0"}, "ok"),
    ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "warning", "slow"),
    ({"PACELINE_TIMEOUT": "60"}, "ok"),
    ({"PACELINE_TIMEOUT": ""}, "ok"),
    ({"PACELINE_TIMEOUT": "soon"}, "problem", "'soon'", "positive number"),
    ({"PACELINE_TIMEOUT": "-1"}, "problem"),
    ({"PACELINE_TIMEOUT": "nan"}, "problem"),
    ({"PACELINE_CPU_REPLICAS": "2"}, "ok"),
    ({"PACELINE_CPU_REPLICAS": "two"}, "problem", "whole number"),
    ({"PACELINE_CPU_REPLICAS": "0"}, "problem"),
    ({"PACELINE_STRICT": "yes"}, "problem", "give 0 or 1"),
    ({"PACELINE_ISA": "avx1024"}, "problem", "avx512"),
    ({"PACELINE_STRICT": "yes", "PACELINE_X": ""}, "problem", "PACELINE_X"),
)


def test_variables_of_others_are_not_shown():
    assert "MY_TOKEN" not in software.judge_environment(environment(OMP_X="4")).found


def test_every_variable_that_is_read_is_known_and_nothing_else():
    read = set()
    for folder, glob in (("csrc", "**/*.[ch]"), ("python", "**/*.py"), (".", "*.py")):
        for path in (ROOT / folder).glob(glob):
            if path.name != "software.py":
                read |= set(
                    re.findall(r"\"(PACELINE_[A-Z_]*[A-Z])\"", path.read_text())
                )
    assert set(software.VARIABLES) == read


# ---- the operating system -----------------------------------------------------------

test_less_than_two_cores_are_a_warning = judged(
    system.judge_cores,
    cores,
    ({}, "ok", "8 of 8 cores"),
    ({"n_nodes": 2}, "ok", "2 NUMA nodes"),
    ({"n_affinity": 2}, "ok", "2 of 8 cores"),
    ({"n_affinity": 1}, "warning", "taskset"),
    ({"n_machine": 1, "n_affinity": 1}, "warning", "less than two cores"),
    ({"quota": 1.5}, "warning", "1.5 cores", "docker run --cpus"),
    ({"quota": 4.0}, "ok", "time for 4 cores"),
)

FEW_TASKS = _cgroup.Usage(100, 60)

test_limits_that_stop_ranks_are_said = judged(
    system.judge_limits,
    partial(system.Limits, descriptors=65536, tasks=60000),
    ({}, "ok", "65536 open files", "60000 processes"),
    ({"descriptors": None, "tasks": None}, "ok", "any number of open files"),
    ({"descriptors": 256}, "warning", "ulimit -n"),
    ({"descriptors": 64}, "problem", "ulimit -n"),
    ({"tasks": 100}, "warning", "ulimit -u"),
    ({"tasks": 100, "is_root": True}, "ok"),
    ({"group_tasks": FEW_TASKS}, "warning", "40 more tasks", "--pids-limit"),
    ({"group_tasks": _cgroup.Usage(9999, 60)}, "ok"),
    ({"address_bytes": 8 * GIB}, "warning", "8 GiB of addresses", "ulimit -v"),
    ({"file_bytes": MIB}, "warning", "files of 1 MiB", "ulimit -f"),
    ({"locked_bytes": 65536}, "ok"),
    ({"locked_bytes": 65536, "has_infiniband": True}, "warning", "ulimit -l"),
)

test_processes_that_cannot_be_watched_are_a_warning = judged(
    system.judge_processes,
    system.Processes,
    ({}, "ok", "pidfd_open works"),
    ({"pidfd_error": "OSError: [Errno 38]"}, "warning", "Errno 38", "Linux 5.3"),
    ({"host_error": "FileNotFoundError: ns"}, "warning", "Mount all of /proc"),
)

test_a_host_name_without_an_address_is_a_warning = judged(
    system.judge_host_name,
    partial(system.HostName, name="box"),
    ({}, "ok", "'box' has an address"),
    ({"error": "gaierror: -2"}, "warning", "gaierror: -2", "/etc/hosts"),
    ({"seconds": 5.0}, "warning", "after 5 s"),
)

# ---- memory -------------------------------------------------------------------------

test_little_memory_is_a_warning = judged(
    memory.judge_memory,
    partial(memory.Memory, total=64 * GIB, available=60 * GIB, limit=None),
    ({}, "ok", "60 GiB available of 64 GiB"),
    ({"available": 500 * MIB}, "warning", "500 MiB available"),
    ({"limit": _cgroup.Usage(8 * GIB, GIB)}, "ok", "allows 8 GiB", "7 GiB are free"),
    ({"limit": _cgroup.Usage(GIB, 600 * MIB)}, "warning", "docker run --memory"),
    ({"limit": _cgroup.Usage(99 * GIB, GIB)}, "ok"),
    ({"total": 0, "available": 0}, "warning", "/proc/meminfo"),
)


def test_shared_memory_that_fails_is_a_problem():
    good, bad = (memory.SharedMemory(MIB, error) for error in ("", "OSError: EPERM"))
    assert_finding(memory.judge_shared_memory(good), "ok", "1 MiB written and read")
    assert_finding(memory.judge_shared_memory(bad), "problem", "EPERM", "seccomp")


test_a_small_dev_shm_is_a_warning = judged(
    memory.judge_dev_shm,
    partial(memory.DevShm, total=8 * GIB, free=7 * GIB),
    ({}, "ok", "7 GiB free of 8 GiB"),
    ({"total": 64 * MIB, "free": 64 * MIB}, "warning", "--shm-size"),
    ({"free": 10 * MIB}, "warning", "10 MiB free of 8 GiB"),
    ({"error": "it cannot be written to"}, "warning", "written to"),
)

test_a_malloc_that_checks_all_memory_is_a_warning = judged(
    memory.judge_malloc,
    lambda **variables: memory.look_malloc({"HOME": "/", **variables}),
    ({}, "ok", "with its defaults", "MALLOC_TRIM_THRESHOLD_"),
    ({"MALLOC_MMAP_MAX_": "0"}, "ok", "MALLOC_MMAP_MAX_=0"),
    ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "ok", "libjemalloc"),
    ({"MALLOC_CHECK_": "3"}, "warning", "unset MALLOC_CHECK_"),
    ({"MALLOC_CHECK_": "0"}, "ok"),
)


def test_huge_pages_are_read_and_never_a_problem(tmp_path):
    assert memory.look_huge_pages(tmp_path) == memory.HugePages("", "")
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text("always madvise [never]\n")
    (folder / "shmem_enabled").write_text("always [advise] never\n")
    found = memory.look_huge_pages(tmp_path)
    assert found == memory.HugePages("never", "advise")
    assert_finding(memory.judge_huge_pages(found), "ok", "never", "echo madvise")
    madvise = memory.HugePages("madvise", "never")
    assert memory.judge_huge_pages(madvise).advice == ""
    assert_finding(memory.judge_huge_pages(memory.HugePages("", "")), "ok")


# ---- links and GPUs -----------------------------------------------------------------

test_a_wrong_sum_of_ranks_is_a_problem = judged(
    links.judge_links,
    partial(links.Links, n_bytes=MIB, seconds=1.0),
    ({}, "ok", "1 MiB", "every element right"),
    ({"n_wrong": 3}, "problem", "3 elements are wrong", "Do not train"),
    ({"error": "PeerError: rank 1 died"}, "problem", "rank 1 died"),
)


def test_every_wrong_element_is_counted():
    right = links.pattern(1, 0)
    wrong = bytearray(right)
    assert links.n_different(bytes(wrong), right) == 0
    for place in (0, 4000, len(wrong) - 1):
        wrong[place] ^= 1
    assert links.n_different(bytes(wrong), right) == 3
    assert links.n_different(right[4:] + right[:4], right) == len(right) // 4


ABSENT = f"NotImplementedError: {gpus.NO_DRIVER}libcuda.so.1: cannot open)"
BROKEN = "NotImplementedError: the CUDA driver does not start: unknown error"
GONE, ONE = {"error": ABSENT, "build": "CPU"}, {"n_cards": 1}
STUCK = {"error": BROKEN, "build": "CUDA 13.0"}

test_driver_cards_and_torch_are_compared = judged(
    gpus.judge_driver,
    gpus.Driver,
    (GONE, "ok", "no NVIDIA card"),
    ({**GONE, "build": "CUDA 13.0"}, "ok", "no NVIDIA card"),
    ({**GONE, **ONE, "build": "CUDA 13.0"}, "problem", "1 NVIDIA card", "--gpus all"),
    ({**GONE, **ONE}, "warning", "1 NVIDIA card on", "a CUDA torch"),
    ({"error": ABSENT, "is_named": True}, "problem", "PACELINE_LIBCUDA"),
    (STUCK, "warning", "nvidia-smi"),
    ({**STUCK, **ONE, "visible": ""}, "warning", "hides all GPUs"),
    ({**STUCK, **ONE, "visible": "0"}, "problem", "does not start"),
    ({"version": 13000, "build": "CUDA 13.0"}, "ok", "serves CUDA 13.0"),
    ({"version": 13020, "build": "CUDA 12.8"}, "ok", "serves CUDA 13.2"),
    ({"version": 12080, "build": "CUDA 12.9"}, "ok"),
    ({"version": 12080, "build": "CUDA 13.0"}, "problem", "too old", "CUDA 12"),
    ({"version": 12080, "build": "CPU"}, "warning", "cannot use the GPUs"),
    ({"version": 12080, "build": "ROCm 6.2"}, "warning", "ROCm 6.2"),
    ({"version": 12080}, "ok"),
)


def test_nvidia_cards_on_the_bus_are_counted(tmp_path):
    rows = [("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x1002", "0x030000")]
    for i, (vendor, kind) in enumerate(rows):
        folder = tmp_path / f"sys/bus/pci/devices/0000:0{i}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert gpus.look_driver(tmp_path).n_cards == 1


A100, OLD = gpus.Gpu("A100", 80 * GIB, "8.0"), gpus.Gpu("V100", 32 * GIB, "7.0")
PAIRS = tuple(itertools.permutations(range(2), 2))

test_gpus_are_named_and_their_access_is_said = judged(
    gpus.judge_gpus,
    gpus.Gpus,
    ({"why_none": "this torch is built without CUDA"}, "ok", "without CUDA"),
    (
        {"why_none": "torch sees no CUDA device", "has_driver": True},
        "problem",
        "driver sees a GPU",
        "torch.cuda.init()",
    ),
    ({"gpus": (A100,)}, "ok", "1 x A100 (80 GiB, compute capability 8.0)"),
    ({"gpus": (A100, A100)}, "ok", "2 x A100", "all access each other"),
    ({"gpus": (A100, A100), "blocked": PAIRS}, "ok", "none can", "host memory"),
    ({"gpus": (A100, A100), "blocked": PAIRS[:1]}, "ok", "not 0 to 1"),
    ({"gpus": (OLD, A100)}, "warning", "7.5 on"),
)

test_kernels_that_cannot_be_had_are_a_problem = judged(
    gpus.judge_kernels,
    gpus.Kernels,
    ({}, "ok", "none are needed"),
    ({"sources": ("fatbin", "fatbin")}, "ok", "built into the package, loaded"),
    ({"sources": ("fatbin", "nvrtc")}, "ok", "compiled by NVRTC"),
    ({"error": "OSError: e"}, "problem", "e", "no NVRTC was found"),
    ({"error": "OSError: e", "nvrtc": "/x/libnvrtc.so"}, "problem", "/x/libnvrtc"),
)

test_an_nccl_that_is_missing_is_a_problem = judged(
    gpus.judge_nccl,
    gpus.Nccl,
    ({}, "ok", "not needed"),
    ({"version": 22809}, "ok", "NCCL 2.28.9"),
    ({"version": 2804}, "ok", "NCCL 2.8.4"),
    ({"error": "e"}, "problem", "needs NCCL"),
    ({"error": "e", "is_named": True}, "problem", "PACELINE_LIBNCCL"),
)

test_copies_that_arrive_wrong_are_a_problem = judged(
    gpus.judge_gpu_links,
    gpus.GpuLinks,
    ({}, "ok", "nothing to copy"),
    ({"n_gpus": 1, "n_bytes": MIB}, "ok", "from the host and back"),
    ({"n_gpus": 4, "n_bytes": MIB}, "ok", "between all pairs of 4 GPUs"),
    (
        {"n_gpus": 2, "n_bytes": MIB, "wrong": (("GPU 0", "GPU 1", 5),)},
        "problem",
        "GPU 0 to GPU 1 (5 elements)",
        "iommu=pt",
        "ACS",
        "NCCL_P2P_DISABLE=1",
    ),
)

# ---- the table ----------------------------------------------------------------------

NAMES = """
python extension torch environment cores threads memory shared_memory dev_shm limits
processes host_name malloc huge_pages links driver gpus kernels nccl gpu_links
"""


def test_names_are_stable_and_readings_cannot_change():
    assert [check.name for check in CHECKS] == NAMES.split()
    assert all(check.hint for check in CHECKS if check.is_apart)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cores().quota = 3


def test_numbers_are_written_as_people_do():
    assert [count(n, "core") for n in (1, 2, 0.5)] == ["1 core", "2 cores", "0.5 cores"]
    assert [size(n) for n in (MIB, 1.5 * GIB, 0)] == ["1 MiB", "1.5 GiB", "0 MiB"]
