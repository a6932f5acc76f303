"""Runs torch's own tests of DistributedDataParallel with our class in torch's place."""

import re

import pytest
import torch
import torch_suite_list as suite
from torch_suite import N_RANKS, Server

pytest.importorskip("expecttest", reason="torch's own tests import it")

# The list was made for this torch; others have some tests more and some fewer.
LISTED = (2, 13)
SEEN_AGAIN = [*suite.RUN, *suite.DIFFERS][::24]
# Those of many wrappers take the most time, and ours in ../ddp show the same.
RUN = [
    pytest.param(test, marks=[pytest.mark.long] * (suite.BUILT[test] > 3))
    for test in suite.RUN
]
version = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def in_the_wheel():
    return suite.candidates(suite.source_of_torch())


def of_torch(server, in_the_wheel, test, how):
    """Return how many wrappers torch makes in each rank: its own class has to be good.

    Of the listed version that is known, but for `SEEN_AGAIN`.
    """
    if test not in in_the_wheel:
        pytest.skip(f"torch {torch.__version__} has no such test")
    if version == LISTED and test not in SEEN_AGAIN:
        return (suite.BUILT[test],) * N_RANKS
    verdict = server.run(test, how, is_torch=True)
    if version != LISTED and verdict.kind != "passes":
        pytest.skip(
            f"torch {torch.__version__} does not pass it: {verdict.words[-300:]}"
        )
    assert verdict.kind == "passes", f"torch's own class: {verdict}"
    return verdict.built


@pytest.mark.parametrize("test", RUN)
def test_our_class_passes_torchs_own(test, server, in_the_wheel):
    built = of_torch(server, in_the_wheel, test, suite.RUN[test])
    ours = server.run(test, suite.RUN[test])
    pattern, why = suite.OLDER.get(test, (r"(?!)", ""))
    if version < LISTED and re.search(pattern, ours.words):
        pytest.xfail(f"torch {torch.__version__}: {why}")
    assert ours.kind == "passes", str(ours)
    assert ours.foreign == (0, 0), "torch's constructor was run"
    assert min(ours.built) > 0
    assert ours.built == built


@pytest.mark.parametrize("test", suite.DIFFERS)
def test_our_class_says_what_it_does_not_do_in(test, server, in_the_wheel):
    of_torch(server, in_the_wheel, test, "adapted")
    ours = server.run(test, "adapted")
    assert ours.kind == "fails", str(ours)
    assert re.search(suite.DIFFERS[test][1], ours.words), str(ours)
    assert min(ours.built) > 0
    assert ours.foreign == (0, 0)


@pytest.mark.hand
@pytest.mark.skipif(version != LISTED, reason="the list is that of another torch")
@pytest.mark.parametrize("test", suite.BUILT)
def test_torchs_own_class_is_what_the_list_says(test, server):
    verdict = server.run(test, suite.RUN.get(test, "adapted"), is_torch=True)
    assert verdict.kind == "passes", str(verdict)
    assert verdict.built == (suite.BUILT[test],) * N_RANKS


def test_a_test_that_hangs_is_ended_and_the_next_one_runs(server):
    hangs = server.run("test_DistributedDataParallelCPU", "hangs on purpose")
    assert hangs.kind == "hangs"
    assert "stands at" in hangs.words
    assert server.run("test_DistributedDataParallelCPU", "plain").kind == "passes"


def test_torchs_constructor_is_noticed_where_it_is_run(server):
    verdict = server.run("test_DistributedDataParallelCPU", "with torch's constructor")
    assert verdict.kind == "fails"
    assert max(verdict.foreign) > 0


@pytest.mark.skipif(version != LISTED, reason="the list is that of another torch")
def test_every_test_of_torch_that_makes_the_class_is_listed_once(in_the_wheel):
    listed = [*suite.PLAIN, *suite.STRICT, *suite.ADAPTED, *suite.ADAPTED_STRICT]
    listed += [*suite.DIFFERS, *suite.NOT_RUN]
    assert len(listed) == len(set(listed))
    assert set(listed) == in_the_wheel
