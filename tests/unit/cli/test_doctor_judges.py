"""The doctor's findings for readings, most of which this machine cannot have."""

import re
from pathlib import Path

import pytest
from paceline._cli.doctor import gpus, links, machine
from paceline._cli.doctor.command import CHECKS
from paceline._cli.doctor.finding import GIB, MIB, Status, count, size

ROOT = Path(__file__).parents[3]


def assert_finding(finding, status, *words):
    """Check the status of a finding, and that it contains each of some words."""
    text = f"{finding.found}\n{finding.advice}"
    assert finding.status is Status(status), text
    assert all(word in text for word in words), text
    assert finding.found
    assert finding.advice or status == "ok"


def judged(judge, *rows):
    """Return a test of rows: a reading, and the status and words of its finding."""

    @pytest.mark.parametrize("row", rows, ids=lambda row: row[1])
    def test(row):
        reading, status, *words = row
        assert_finding(judge(**reading), status, *words)

    return test


test_sums_without_vector_instructions_are_a_warning = judged(
    lambda isa: machine.judge_isa("paceline 1.2", isa),
    ({"isa": "avx2"}, "ok", "paceline 1.2", "by avx2"),
    ({"isa": "plain"}, "warning", "no vector instructions"),
)

IS_29 = {"version": "2.9.0"}
test_a_torch_that_is_missing_or_old_is_a_problem = judged(
    machine.judge_torch,
    ({"version": "2.13.0+cpu", "build": "CPU"}, "ok", "torch 2.13.0+cpu", "CPU"),
    ({"version": "2.4.0"}, "ok"),
    ({"version": "3.0.0"}, "ok"),
    ({"version": "2.3.1"}, "problem", "older than 2.4", "torch>=2.4"),
    ({"version": "1.13.1", "error": "x"}, "problem", "older than 2.4"),
    ({"version": "", "error": "ModuleNotFoundError: x"}, "problem", "x", "pip install"),
    ({**IS_29, "error": "OSError: libx"}, "problem", "torch 2.9.0", "libx", "reinst"),
    ({**IS_29, "has_groups": False}, "problem", "torch.distributed"),
    ({"version": "unknown"}, "ok"),
)


def cores(n_affinity=8, quota=None, n_threads=8, n_bound=None):
    n_bound = n_affinity if n_bound is None else n_bound
    return machine.judge_cores(8, n_affinity, quota, n_threads, n_bound)


test_cores_are_compared_with_two_and_with_threads_and_binding = judged(
    cores,
    ({}, "ok", "8 of 8 cores", "8 torch threads"),
    ({"n_threads": 1}, "ok", "1 torch thread"),
    ({"n_affinity": 2, "n_threads": 2}, "ok", "2 of 8 cores"),
    ({"n_affinity": 1}, "warning", "less than two cores", "taskset"),
    ({"quota": 1.5}, "warning", "1.5 cores", "docker run --cpus"),
    ({"quota": 4.0, "n_threads": 4}, "ok", "time for 4 cores"),
    ({"n_threads": 9}, "warning", "OMP_NUM_THREADS=8"),
    ({"quota": 2.5}, "warning", "2.5 cores", "OMP_NUM_THREADS=2"),
    ({"n_bound": 1}, "warning", "bound to 1 of", "OMP_PROC_BIND"),
)

test_names_that_are_misspelt_and_wrong_values_are_found = judged(
    lambda is_reached=True, **variables: machine.judge_environment(
        {"HOME": "/", **variables}, is_reached
    ),
    ({}, "ok", "nothing is set"),
    ({"OMP_NUM_THREADS": "4"}, "ok", "OMP_NUM_THREADS=4"),
    ({"NCCL_P2P_DISABLE": "1"}, "ok", "NCCL_P2P_DISABLE=1"),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, "ok", "CUDA_VISIBLE_DEVICES=0,1"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "x:y"}, "ok", "PYTORCH_CUDA_ALLOC_CONF=x:y"),
    ({"PACELINE_TIMOUT": "3"}, "warning", "did you mean PACELINE_TIMEOUT?"),
    ({"PACELINE_FAST": "1"}, "warning", "no variable PACELINE_FAST"),
    ({"PACELINE_NCCL_BLOCKING": "0"}, "warning", "no variable PACELINE_NCCL_BLOCKING."),
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
    ({"is_reached": False}, "warning", "paceline.pth", "PACELINE_INSTALL=1 change no"),
)


def test_variables_of_others_are_not_shown():
    finding = machine.judge_environment({"MY_TOKEN": "x", "OMP_X": "4"})
    assert finding.found == "OMP_X=4"
    finding = machine.judge_environment({"PACELINE_SECRET": "word"})
    assert finding.found == "PACELINE_SECRET=..."


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("PACELINE_SECRET", "long enough for a secret", "ok"),
        ("PACELINE_SECRET", "too short", "problem"),
        ("PACELINE_SECRT", "long enough for a secret", "warning"),
    ],
)
def test_the_secret_of_a_job_is_not_shown(name, value, status):
    finding = machine.judge_environment({name: value})
    assert_finding(finding, status, f"{name}=...")
    assert value not in f"{finding}"


def test_every_variable_that_is_read_is_known_and_nothing_else():
    read = set()
    for folder, glob in (("csrc", "**/*.[ch]"), ("python", "**/*.py"), (".", "*.py")):
        for path in (ROOT / folder).glob(glob):
            if path.name != "machine.py":
                read |= set(
                    re.findall(r"\"(PACELINE_[A-Z_]*[A-Z])\"", path.read_text())
                )
    assert set(machine.VARIABLES) == read


test_a_small_dev_shm_is_a_warning = judged(
    lambda total=8 * GIB, free=7 * GIB, error="": machine.judge_dev_shm(
        total, free, error
    ),
    ({}, "ok", "7 GiB free of 8 GiB"),
    ({"total": 64 * MIB, "free": 64 * MIB}, "warning", "--shm-size"),
    ({"free": 10 * MIB}, "warning", "10 MiB free of 8 GiB"),
    ({"error": "it cannot be written to"}, "warning", "written to"),
)

test_a_wrong_sum_of_ranks_is_a_problem = judged(
    lambda n_wrong=0, error="": links.judge_links(1.0, n_wrong, error),
    ({}, "ok", "23.6 MiB", "every element right"),
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
    ({"version": 12080, "build": "CUDA 13.0"}, "problem", "CUDA 12 or older"),
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
    assert gpus._count_cards(tmp_path) == 1


test_a_gpu_that_the_driver_alone_sees_is_a_problem = judged(
    lambda has_driver: gpus.judge_no_gpu("torch sees no CUDA device", has_driver),
    ({"has_driver": False}, "ok", "no CUDA device"),
    ({"has_driver": True}, "problem", "driver sees a GPU", "torch.cuda.init()"),
)

ONE_WAY = {("GPU 0", "GPU 1"): 5}
test_copies_that_arrive_wrong_are_a_problem = judged(
    lambda n_gpus, n_wrong: gpus.judge_gpu_links(n_gpus, n_wrong),
    ({"n_gpus": 0, "n_wrong": {}}, "ok", "nothing to copy"),
    ({"n_gpus": 4, "n_wrong": {}}, "ok", "between all pairs of 4 GPUs"),
    (
        {"n_gpus": 2, "n_wrong": ONE_WAY},
        "problem",
        "GPU 0 to GPU 1 (5 elements)",
        "iommu=pt",
        "ACS",
        "NCCL_P2P_DISABLE=1",
    ),
)


def test_names_are_stable():
    names = "extension environment dev_shm links torch cores driver gpus gpu_links"
    assert [check.name for check in CHECKS] == names.split()
    for index, check in enumerate(CHECKS):
        assert check.needs in ["", *names.split()[:index]]


def test_numbers_are_written_as_people_do():
    assert [count(n, "core") for n in (1, 2, 0.5)] == ["1 core", "2 cores", "0.5 cores"]
    assert [size(n) for n in (MIB, 1.5 * GIB, 0)] == ["1 MiB", "1.5 GiB", "0 MiB"]
