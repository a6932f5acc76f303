"""The limits of control groups, read from folders as the kernel shows them."""

import pytest
from paceline import _cgroup
from paceline._cgroup import Usage

NO_LIMIT = 9223372036854771712  # as version 1 writes it


def make(root, files):
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")
    return root


V2 = {"proc/self/cgroup": "0::/user/job"}
V1 = {"proc/self/cgroup": "7:cpu,cpuacct:/job\n5:memory:/job\n3:pids:/job\n0::/job"}
FS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2, None),
        ({**V2, f"{FS}/user/job/cpu.max": "max 100000"}, None),
        ({**V2, f"{FS}/user/job/cpu.max": "150000 100000"}, 1.5),
        ({**V2, f"{FS}/user/cpu.max": "50000 100000"}, 0.5),
        (
            {
                **V2,
                f"{FS}/user/job/cpu.max": "400000 100000",
                f"{FS}/user/cpu.max": "200000 100000",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/", f"{FS}/cpu.max": "300000 100000"}, 3.0),
        ({"proc/self/cgroup": "0::/../x", f"{FS}/cpu.max": "300000 100000"}, 3.0),
        ({**V2, f"{FS}/user/job/cpu.max": "nonsense"}, None),
        (
            {
                **V1,
                f"{FS}/cpu,cpuacct/job/cpu.cfs_quota_us": "250000",
                f"{FS}/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        (
            {  # in a container, whose group is what is mounted
                **V1,
                f"{FS}/cpu/cpu.cfs_quota_us": "50000",
                f"{FS}/cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            {
                **V1,
                f"{FS}/cpu/job/cpu.cfs_quota_us": "-1",
                f"{FS}/cpu/job/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_the_tightest_quota_of_cores_counts(tmp_path, files, quota):
    assert _cgroup.cpu_quota(make(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "usage"),
    [
        (V2, None),
        ({**V2, f"{FS}/user/job/memory.max": "max"}, None),
        (
            {
                **V2,
                f"{FS}/user/job/memory.max": "1000",
                f"{FS}/user/job/memory.current": "700",
                f"{FS}/user/job/memory.stat": "anon 400\ninactive_file 300",
            },
            Usage(1000, 400),
        ),
        (
            {
                **V2,
                f"{FS}/user/job/memory.max": "1000",
                f"{FS}/user/job/memory.current": "10",
                f"{FS}/user/memory.max": "2000",
                f"{FS}/user/memory.current": "1900",
            },
            Usage(2000, 1900),
        ),
        ({**V1, f"{FS}/memory/job/memory.limit_in_bytes": NO_LIMIT}, None),
        (
            {
                **V1,
                f"{FS}/memory/job/memory.limit_in_bytes": "5000",
                f"{FS}/memory/job/memory.usage_in_bytes": "3000",
                f"{FS}/memory/job/memory.stat": "total_inactive_file 1000",
            },
            Usage(5000, 2000),
        ),
    ],
)
def test_the_limit_of_memory_with_the_least_left_counts(tmp_path, files, usage):
    assert _cgroup.memory(make(tmp_path, files)) == usage


def test_the_limit_of_tasks_is_read_in_both_versions(tmp_path):
    for name, files, folder in (("2", V2, "user/job"), ("1", V1, "pids/job")):
        limits = {f"{FS}/{folder}/pids.max": 100, f"{FS}/{folder}/pids.current": 90}
        root = make(tmp_path / name, {**files, **limits})
        assert _cgroup.tasks(root).free == 10
    assert _cgroup.tasks(tmp_path / "none") is None


def test_this_machine_can_be_read():
    for read in (_cgroup.cpu_quota, _cgroup.memory, _cgroup.tasks):
        read()
