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
ROOT = {"proc/self/cgroup": "0::/"}
OUTSIDE = {"proc/self/cgroup": "0::/../x"}


def of(groups, folder="", **files):
    """Return the files of a group, whose names have dots for double underscores."""
    place = "/".join(filter(None, ["sys/fs/cgroup", folder]))
    return {
        **groups,
        **{f"{place}/{k.replace('__', '.')}": v for k, v in files.items()},
    }


def quota_of(folder, us):
    period = {"cpu__cfs_period_us": "100000"}
    return of(V1, folder, cpu__cfs_quota_us=us, **period)


JOB, USER, MEMORY = "user/job", "user", "memory/job"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2, None),
        (of(V2, JOB, cpu__max="max 100000"), None),
        (of(V2, JOB, cpu__max="150000 100000"), 1.5),
        (of(V2, USER, cpu__max="50000 100000"), 0.5),
        (
            of(V2, JOB, cpu__max="400000 100000")
            | of(V2, USER, cpu__max="200000 100000"),
            2.0,
        ),
        (of(ROOT, cpu__max="300000 100000"), 3.0),
        (of(OUTSIDE, cpu__max="300000 100000"), 3.0),
        (of(V2, JOB, cpu__max="nonsense"), None),
        (quota_of("cpu,cpuacct/job", "250000"), 2.5),
        (quota_of("cpu", "50000"), 0.5),  # in a container, whose group is mounted
        (quota_of("cpu/job", "-1"), None),
    ],
)
def test_the_tightest_quota_of_cores_counts(tmp_path, files, quota):
    assert _cgroup.cpu_quota(make(tmp_path, files)) == quota


CACHED = "anon 400\ninactive_file 300"
FULL = {"memory__max": "1000", "memory__current": "700", "memory__stat": CACHED}
OF_1 = {
    "memory__limit_in_bytes": "5000",
    "memory__usage_in_bytes": "3000",
    "memory__stat": "total_inactive_file 1000",
}


@pytest.mark.parametrize(
    ("files", "usage"),
    [
        (V2, None),
        (of(V2, JOB, memory__max="max"), None),
        (of(V2, JOB, **FULL), Usage(1000, 400)),
        (
            of(V2, JOB, memory__max="1000", memory__current="10")
            | of(V2, USER, memory__max="2000", memory__current="1900"),
            Usage(2000, 1900),
        ),
        (of(V1, MEMORY, memory__limit_in_bytes=NO_LIMIT), None),
        (of(V1, MEMORY, **OF_1), Usage(5000, 2000)),
    ],
)
def test_the_limit_of_memory_with_the_least_left_counts(tmp_path, files, usage):
    assert _cgroup.memory(make(tmp_path, files)) == usage


def test_the_limit_of_tasks_is_read_in_both_versions(tmp_path):
    for name, files, folder in (("2", V2, "user/job"), ("1", V1, "pids/job")):
        limits = of(files, folder, pids__max=100, pids__current=90)
        root = make(tmp_path / name, limits)
        assert _cgroup.tasks(root).free == 10
    assert _cgroup.tasks(tmp_path / "none") is None


def test_this_machine_can_be_read():
    for read in (_cgroup.cpu_quota, _cgroup.memory, _cgroup.tasks):
        read()
