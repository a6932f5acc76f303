"""Room for a world's descriptors: the soft limit rises only as far as needed."""

import os
import resource

import pytest
from paceline._ddp import open_files

MANY = 500
"""More than the reserve that `make_room` adds for other files."""


def limits():
    return resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.fixture
def leave_room():
    """Return a function that lowers the soft limit to some files more than are open."""
    before = limits()

    def leave(n_more):
        soft = len(os.listdir("/proc/self/fd")) + n_more
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        return soft

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def hard():
    found = limits()[1]
    if found == resource.RLIM_INFINITY:
        pytest.skip("there is no limit here")
    return found


def test_the_soft_limit_is_raised_by_what_lacks(leave_room):
    soft = leave_room(MANY)
    hard = limits()[1]
    open_files.make_room(2 * MANY)
    now = limits()
    assert soft + MANY <= now[0] < soft + 2 * MANY
    assert now[1] == hard
    held = [os.dup(0) for _ in range(2 * MANY)]
    for descriptor in held:
        os.close(descriptor)


def test_a_hard_limit_that_just_suffices_is_used_whole(leave_room, hard):
    soft = leave_room(MANY)
    open_files.make_room(hard - (soft - MANY) - 1)  # without the one that lists them
    assert limits() == (hard, hard)


def test_a_limit_that_suffices_or_cannot_be_seen_is_left_as_it_is(
    leave_room, monkeypatch
):
    def fail(path):
        raise FileNotFoundError(2, "No such file or directory", path)

    soft = leave_room(MANY)
    open_files.make_room(10)
    assert limits()[0] == soft
    monkeypatch.setattr(os, "listdir", fail)
    open_files.make_room(2 * MANY)
    assert limits()[0] == soft


def test_a_hard_limit_without_room_is_one_error(leave_room, hard):
    soft = leave_room(MANY)
    with pytest.raises(OSError, match=rf"its limit is {hard}: raise it \(ulimit -Hn"):
        open_files.make_room(hard)
    assert limits() == (soft, hard)
