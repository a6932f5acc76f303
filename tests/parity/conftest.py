"""What the comparisons with torch share."""

import os

import pytest

# With TEST_RANKS_PER_HOST (support/ranks.py) ranks are on several hosts.
ONE_HOST = {
    "words of shared memory: what a rank was at, and its process": (
        "test_a_rank_that_dies_in_a_join_is_named_by_every_other",
        "test_paceline_raises_at_once_on_every_rank_where",
        "test_paceline_raises_at_once_in_processes_of_their_own_where",
        "test_a_rank_that_lives_and_does_not_come_is_named_at_the_deadline",
        "test_a_rank_that_alone_changes_what_travels_is_an_error_on_all",
        "test_a_forward_that_waits_for_rank_0_in_its_backward_is_an_error",
    ),
    "ranks that wait for one another are an error at the deadline, and not at once": (
        "test_two_backwards_in_opposite_order_on_two_ranks_are_an_error_at_once",
        "test_a_wrapper_without_a_context_of_its_own_is_an_error_in_a_join",
        "test_tables_in_another_order_than_they_were_made_in_are_an_error",
        "test_a_rank_that_dies_between_its_words_is_named_at_once",
    ),
    "hosts await rank 0's buffers after each forward that records gradients": (
        "test_rank_0_evaluates_alone",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "TEST_RANKS_PER_HOST" not in os.environ:
        return
    for reason, names in ONE_HOST.items():
        for item in items:
            if item.name.partition("[")[0] in names:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def start_by_fork(forked_workers):
    """Have every file's worker processes forked."""
