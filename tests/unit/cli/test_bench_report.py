"""Ratios and advice of ``paceline bench`` for measurements given in the test."""

import pytest
from paceline._cli.bench import command, steps


def rows_of(*, plain, replicas, ranks, n=2, n_cores=4, model="digits"):
    """Return rows of a world: milliseconds of three turns, the same on all ranks."""
    on_ranks = {steps.TORCH: [8.0] * 3, steps.RANKS: ranks}
    on_first = {steps.PLAIN: plain, steps.REPLICAS: replicas, **on_ranks}
    others = {model: steps.Timed(64, on_ranks)}
    first = {model: steps.Timed(64, on_first)}
    return command.rows_of([first, *[others] * (n - 1)], n_cores)


def test_a_ratio_is_of_turns_of_one_round_and_not_of_medians():
    # Load doubles all times of the second round, which leaves ratios unchanged.
    rows = rows_of(plain=[8, 16, 8], replicas=[4, 8, 4], ranks=[2, 4, 2])
    found = {row.contestant: row for row in rows}
    assert found[steps.REPLICAS].against_plain == [2, 2, 2]
    assert found[steps.RANKS].against_plain == [4, 4, 4]
    assert found[steps.RANKS].against_torch == [4, 2, 4]
    assert found[steps.PLAIN].against_plain == []
    assert found[steps.RANKS].samples_per_second == 64 / 2e-3
    assert (found[steps.PLAIN].n_parallel, found[steps.PLAIN].n_threads) == (1, 4)
    assert (found[steps.RANKS].n_parallel, found[steps.RANKS].n_threads) == (2, 2)
    replicas = found[steps.REPLICAS]  # those of one process
    assert (replicas.n_parallel, replicas.n_threads) == (2, 4)


def test_a_turn_is_the_mean_over_the_ranks_that_took_it():
    first = {"digits": steps.Timed(8, {"plain": [9.0], "ranks": [1.0]})}
    second = {"digits": steps.Timed(8, {"ranks": [3.0]})}
    found = {row.contestant: row for row in command.rows_of([first, second], 2)}
    assert found["ranks"].step_ms == 2.0
    assert found["plain"].step_ms == 9.0


@pytest.mark.parametrize(
    ("device", "replicas", "ranks", "words"),
    [
        ("cpu", 9.0, 2.0, "OMP_NUM_THREADS=2 torchrun --nproc-per-node 2 t"),
        ("cuda", 9.0, 2.0, "\ntorchrun --nproc-per-node 2 train.py"),
        ("cuda", 2.0, 9.0, "paceline.DataParallel with 2 replicas: 4.00 "),
        ("cpu", 9.0, 9.0, "no wrapper is faster than the plain module"),
    ],
)
def test_the_advice_is_what_was_fastest(device, replicas, ranks, words):
    rows = rows_of(plain=[8.0] * 3, replicas=[replicas] * 3, ranks=[ranks] * 3)
    advice = command.advise(rows, device)
    assert words in advice
    assert "Too few rounds" not in advice


def test_the_advice_weighs_all_models_and_all_numbers_of_ranks():
    rows = rows_of(plain=[8.0] * 3, replicas=[9.0] * 3, ranks=[2.0] * 3)
    rows += rows_of(plain=[8.0] * 3, replicas=[9.0] * 3, ranks=[16.0] * 3, model="b")
    for model in ("digits", "b"):
        rows += rows_of(
            plain=[8.0] * 3, replicas=[9.0] * 3, ranks=[4.0] * 3, n=4, model=model
        )
    advice = command.advise(rows, "cpu")
    assert "On these 2 models the fastest is paceline.Distr" in advice
    assert "with 4 ranks of 1 thread each: 2.00 times as fast" in advice
    assert "geometric mean" in advice


def test_the_advice_says_what_it_cannot_be_told_from():
    rows = rows_of(plain=[8.0] * 3, replicas=[2.1] * 3, ranks=[1.0, 2.0, 4.0])
    assert "tell it from paceline.DataParallel with 2: " in command.advise(rows, "cpu")
