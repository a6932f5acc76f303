"""Ratios, advice and tables of ``paceline bench``, of turns that are written here."""

import sys

import pytest
from paceline._cli.bench import report, steps, tables
from paceline._cli.bench.stats import Interval


def rows_of(*, plain, replicas, ranks, n=2, n_cores=4, model="digits"):
    """Rows of a world: milliseconds of three turns, the same on all ranks."""
    on_ranks = {steps.TORCH: [8.0] * 3, steps.RANKS: ranks}
    on_first = {steps.PLAIN: plain, steps.REPLICAS: replicas, **on_ranks}
    others = {model: {"n_samples": 64, "step_ms": on_ranks}}
    first = {model: {"n_samples": 64, "step_ms": on_first}}
    return report.step_rows([first, *[others] * (n - 1)], n_cores)


def test_a_ratio_is_of_turns_of_one_round_and_not_of_medians():
    # Load doubles all times of the second round: ratios do not see it.
    rows = rows_of(plain=[8, 16, 8], replicas=[4, 8, 4], ranks=[2, 4, 2])
    found = {row.contestant: row for row in rows}
    assert found[steps.REPLICAS].against_plain == Interval(2, 2, 2)
    assert found[steps.RANKS].against_plain == Interval(4, 4, 4)
    assert found[steps.RANKS].against_torch == Interval(4, 2, 4)
    assert found[steps.PLAIN].against_plain is None
    assert found[steps.RANKS].samples_per_second == 64 / 2e-3
    assert (found[steps.PLAIN].n_parallel, found[steps.PLAIN].n_threads) == (1, 4)
    assert (found[steps.RANKS].n_parallel, found[steps.RANKS].n_threads) == (2, 2)
    replicas = found[steps.REPLICAS]  # of one process
    assert (replicas.n_parallel, replicas.n_threads) == (2, 4)


def test_a_turn_is_the_mean_over_the_ranks_that_took_it():
    first = {"digits": {"n_samples": 8, "step_ms": {"plain": [9.0], "ranks": [1.0]}}}
    second = {"digits": {"n_samples": 8, "step_ms": {"ranks": [3.0]}}}
    found = {row.contestant: row for row in report.step_rows([first, second], 2)}
    assert found["ranks"].step_ms == 2.0
    assert found["plain"].step_ms == 9.0


def test_calls_are_compared_turn_by_turn():
    gloo, ours = [1.0, 9.0, 1.0, 4.0, 4.0, 4.0], [1.0, 1.0, 5.0, 2.0, 2.0, 2.0]
    times_us = {"gloo": {"1024": gloo}, "paceline": {"1024": ours}}
    (row,) = report.call_rows(2, times_us, 2)
    assert row.times_as_fast == Interval(1.5, 1.0, 2.0)
    assert report.call_cells([row])[0][:2] == ("2", "1 KiB")


@pytest.mark.parametrize(
    ("device", "replicas", "ranks", "choice", "words"),
    [
        ("cpu", 9.0, 2.0, "ranks", "OMP_NUM_THREADS=2 torchrun --nproc-per-node 2 t"),
        ("cuda", 9.0, 2.0, "ranks", "\ntorchrun --nproc-per-node 2 train.py"),
        ("cuda", 2.0, 9.0, "replicas", "paceline.DataParallel with 2 replicas: 4.00 "),
        ("cpu", 9.0, 9.0, "plain", "no wrapper is faster than the plain module"),
    ],
)
def test_the_advice_is_what_was_fastest(device, replicas, ranks, choice, words):
    rows = rows_of(plain=[8.0] * 3, replicas=[replicas] * 3, ranks=[ranks] * 3)
    advice = report.advise(rows, device)
    assert advice.contestant == choice
    assert words in advice.text
    assert "Too few rounds" not in advice.text
    assert advice.times_as_fast == pytest.approx(1.0 if choice == "plain" else 4.0)


def test_the_advice_weighs_all_models_and_all_numbers_of_ranks():
    rows = rows_of(plain=[8.0] * 3, replicas=[9.0] * 3, ranks=[2.0] * 3)
    rows += rows_of(plain=[8.0] * 3, replicas=[9.0] * 3, ranks=[16.0] * 3, model="b")
    for model in ("digits", "b"):
        rows += rows_of(
            plain=[8.0] * 3, replicas=[9.0] * 3, ranks=[4.0] * 3, n=4, model=model
        )
    advice = report.advise(rows, "cpu")
    assert (advice.contestant, advice.n_parallel, advice.n_threads) == ("ranks", 4, 1)
    assert advice.times_as_fast == pytest.approx(2.0)
    assert "these 2 models" in advice.text
    assert "geometric mean" in advice.text


@pytest.mark.parametrize(
    ("replicas", "ranks", "rivals"),
    [
        ([9.0] * 3, [4.0, 16.0, 4.0], "the plain module"),
        ([3.0, 5.0, 5.0], [4.0] * 3, "paceline.DataParallel with 2"),
        ([9.0] * 3, [9.0, 7.0, 9.0], "paceline.DistributedDataParallel with 2"),
        ([1.0, 9.0, 1.0], [1.0, 9.0, 2.0], "DistributedDataParallel with 2, the plain"),
    ],
)
def test_what_the_rounds_cannot_tell_apart_is_named(replicas, ranks, rivals):
    rows = rows_of(plain=[8.0] * 3, replicas=replicas, ranks=ranks)
    text = report.advise(rows, "cpu").text
    assert "\nToo few rounds to tell it from " in text
    assert f"{rivals}" in text.splitlines()[-1]
    assert text.endswith(": measure longer, by --seconds.")


def test_threads_are_no_matter_of_gpus():
    rows = rows_of(plain=[8.0] * 3, replicas=[2.0] * 3, ranks=[4.0] * 3)
    text = report.advise(rows, "cuda").text
    assert "thread" not in text
    assert text.endswith("paceline.DataParallel(model)")


def test_tables_have_the_same_cells_with_rich_and_without(capsys, monkeypatch):
    pytest.importorskip("rich")
    rows = rows_of(plain=[8, 16, 8], replicas=[4, 8, 4], ranks=[2, 4, 2])
    headings, cells = report.STEP_HEADINGS, report.step_cells(rows)
    tables.show("Steps", headings, cells)
    by_rich = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    tables.show("Steps", headings, cells)
    plain = capsys.readouterr().out
    assert by_rich.split() == plain.split()
    assert plain.splitlines()[0] == "Steps"
