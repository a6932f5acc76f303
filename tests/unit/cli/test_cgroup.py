"""Limits of control groups, read from folders in the kernel's layout."""

import pytest
from paceline import _cgroup

NO_LIMIT = 9223372036854771712  # in version 1


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
    """Return the files of a group; double underscores in names stand for dots."""
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
        (quota_of("cpu", "50000"), 0.5),  # in a container, which mounts its own group
        (quota_of("cpu/job", "-1"), None),
    ],
)
def test_the_tightest_quota_of_cores_counts(tmp_path, files, quota):
    assert _cgroup.cpu_quota(make(tmp_path, files)) == quota


def test_this_machine_can_be_read():
    _cgroup.cpu_quota()
