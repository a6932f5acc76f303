"""Check paceline's column of the table in README.md: see sixteen.py."""

import re
import time
from pathlib import Path

import paceline
import pytest
from cases import on_gpus_too, on_ranks
from sixteen import AT_ONCE, DEADLINE, EXPERIMENTS, Report, judge, run

DIFFERS = r"MismatchError: DDP expects same model across all ranks, but rank 0 has "

# experiment: the begin of each rank's message, or None for a rank without an error
RAISES = {
    "rank_1_has_a_float64_model": [
        DIFFERS + r"parameter 'weight' \(torch\.float32 .*"
        r"where rank 1 has parameter 'weight' \(torch\.float64 "
    ]
    * 2,
    "rank_1_registers_its_layers_in_another_order": [
        DIFFERS + r"parameter 'first\.weight' .*where rank 1 has "
        r"parameter 'second\.weight' "
    ]
    * 2,
    "rank_1_has_a_wider_layer": [
        DIFFERS + r"parameter 'weight' \(torch\.float32 of shape \(4, 4\).*"
        r"where rank 1 has parameter 'weight' \(torch\.float32 of shape \(5, 4\)"
    ]
    * 2,
    "rank_1_has_more_parameters": [
        DIFFERS + r"nothing where rank 1 has parameter '1\.weight' .*"
        r"\(rank 0 has 2 params, rank 1 has 4\)"
    ]
    * 2,
    "rank_1_exits_before_its_backward": [
        r"PeerError: rank 0: rank 1 \(process \d+\) died \(step 1, in the user's code",
        None,
    ],
    "rank_1_takes_a_step_fewer_and_drops_its_model": [
        r"PeerError: rank 0: rank 1 \(process \d+\) has left .*"
        r"every rank needs the same number of steps",
        None,
    ],
    "rank_1_alone_makes_its_model_float64": [
        r"MismatchError: rank 0: rank 1 issued another operation .*changed after wrap",
        r"MismatchError: rank 1: .*changed after wrapping",
    ],
}

# Experiments that end a process or a group cannot share their ranks with others.
IN_PROCESSES = [
    "rank_1_exits_before_its_backward",
    "rank_1_alone_makes_its_model_float64",
]
AT_THE_DEADLINE = "rank_1_takes_a_step_fewer_and_stays"
WORKS = [name for name in EXPERIMENTS if name not in (*RAISES, AT_THE_DEADLINE)]


def assert_messages(verdict, patterns):
    for message, pattern in zip(verdict.errors, patterns, strict=True):
        if pattern is None:
            assert message is None
        else:
            assert message is not None, str(verdict)
            assert re.match(pattern, message, re.DOTALL), message
            kind, _, words = message.partition(": ")
            assert getattr(paceline, kind)(words).rank == 1, message


def assert_raises(name, verdict):
    assert verdict.kind == "raises", str(verdict)
    assert verdict.seconds < AT_ONCE
    assert_messages(verdict, RAISES[name])


def verdict_on(ranks, name):
    """Run an experiment on the existing ranks."""
    pairs, error, began = None, None, time.monotonic()
    try:
        pairs = EXPERIMENTS[name].body(ranks.ours, ranks.rank)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    reports = ranks.all(Report(began, time.monotonic(), pairs, error))
    return judge(tuple(reports))


@on_gpus_too(
    name=[
        "gradients_are_taken_by_autograd_grad",
        "two_forwards_come_before_one_backward",
        "rank_0_alone_evaluates",
    ]
)
@on_ranks(name=WORKS)
def test_paceline_works_where(ranks, name):
    verdict = verdict_on(ranks, name)
    assert verdict.kind == "works", str(verdict)


@on_gpus_too(name=["rank_1_takes_a_step_fewer_and_drops_its_model"])
@on_ranks(name=[name for name in RAISES if name not in IN_PROCESSES])
def test_paceline_raises_at_once_on_every_rank_where(ranks, name):
    assert_raises(name, verdict_on(ranks, name))


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_paceline_raises_at_once_in_processes_of_their_own_where(name):
    assert_raises(name, run("paceline", name))


def test_a_rank_that_lives_and_does_not_come_is_named_at_the_deadline():
    verdict = run("paceline", AT_THE_DEADLINE)
    assert DEADLINE <= verdict.seconds < DEADLINE + 1.0, str(verdict)
    named = (
        r"PeerTimeoutError: rank 0: rank 1 \(process \d+\) lives but kept the others "
        r"waiting beyond the deadline \(step 1, in the user's code"
    )
    assert_messages(verdict, [named, None])


def test_the_table_and_this_file_have_every_experiment():
    assert {*RAISES, AT_THE_DEADLINE} < set(EXPERIMENTS)
    table = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    for experiment in EXPERIMENTS.values():
        assert f"| {experiment.sentence} |" in table
