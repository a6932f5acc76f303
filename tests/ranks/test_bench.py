"""``paceline bench`` as a user runs it: its table, its advice, wrong arguments."""

import os
import sys

import pytest
from paceline._cli.bench import command
from support import warm
from support.processes import children

SECONDS = 300
QUICK = ["--quick", "--models", "digits", "--ranks", "2", "--cpu"]


def bench(*words, **env):
    return warm.run(
        [sys.executable, "-m", "paceline", "bench", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_the_table_has_every_contestant_and_the_command_leaves_nothing():
    warm.run([sys.executable, "-c", ""])  # starts its server, a child of this process
    before = children()
    done = bench(*QUICK)
    assert done.returncode == 0, done.stderr
    _, headings, plain, torch, ours, advice, *_, last = done.stdout.splitlines()
    assert headings.split()[:2] == ["model", "contestant"]
    assert plain.startswith("digits  plain module  ")
    assert torch.startswith("digits  torch's DistributedDataParallel  ")
    assert ours.startswith("digits  paceline.DistributedDataParallel  ")
    assert [line.count("[") for line in (plain, torch, ours)] == [0, 1, 2]
    assert advice.startswith("On this model")
    assert last == "--quick: do not quote these figures."
    assert children() == before


def test_a_rank_that_fails_is_one_message():
    done = bench(*QUICK, PACELINE_TIMEOUT="soon")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "PACELINE_TIMEOUT" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--models", "resnet"], "--models has 'resnet': the models are digits,"),
        (["--models", ""], "--models has '': the models are digits,"),
        (["--ranks", "1"], "--ranks is '1': give whole numbers from 2 to 64"),
        (["--ranks", "2,x"], "--ranks is '2,x'"),
        (["--seconds", "0"], "--seconds is 0: give more than 0"),
        (["--seconds", "nan"], "--seconds is nan: give more than 0"),
        (["--slow"], "unknown argument --slow"),
    ],
)
def test_a_wrong_argument_is_said_before_anything_runs(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--cpu", *words], "paceline")
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert told in errors
