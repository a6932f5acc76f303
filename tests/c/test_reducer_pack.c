/* test_reducer_pack.c - moves deferred until their bucket is posted: the launches,
 * records and waits, in their order, on their streams. */
#include "tracer.h"

/* Events in the order in which they are made: between 1, aside 2, buckets 3 and 4. */

TRACED_TEST(a_bucket_is_packed_by_one_launch_when_its_last_gradient_comes)
{
    gradient data[N_PARAMS];
    learn(it);
    const pl_reducer *one = it->reducers[0];
    for (size_t i = 0; i < N_PARAMS; i++)
        fill(data[i], 1);
    CHECK(!pl_reducer_may_post(one, 3));
    CHECK(mark_ready(it, 0, 3, data[3], PL_REPLACE, 1) == PL_DEFERRED);
    CHECK(asked("") && one->n_posted == 0);
    CHECK(pl_reducer_may_post(one, 2));
    CHECK(mark_ready(it, 0, 2, data[2], PL_REPLACE, 1) == PL_COPIED);
    CHECK(asked("c1:2 r1e3 i3 ") && one->n_posted == 1);
    fill(data[3], 77); /* it may be dropped now */
    fill(data[2], 77);
    CHECK(mark_ready(it, 0, 1, data[1], PL_REPLACE, 1) == PL_DEFERRED);
    CHECK(mark_ready(it, 0, 0, data[0], PL_REPLACE, 1) == PL_COPIED);
    CHECK(asked("c1:2 r1e4 i4 ") && one->n_posted == 2);
    all_ready_of_rank_1(it);
    close_wait_and_order(it);
    CHECK(asked("r9e2 i2 h o9 "));
    CHECK(all_hold(it, 2));
    end_both(it);
}

TRACED_TEST(a_bucket_that_is_ready_is_packed_when_its_turn_comes)
{
    gradient data[N_PARAMS];
    learn(it);
    for (size_t i = 0; i < N_PARAMS; i++)
        fill(data[i], 1);
    CHECK(mark_ready(it, 0, 1, data[1], PL_REPLACE, 1) == PL_DEFERRED);
    CHECK(!pl_reducer_may_post(it->reducers[0], 0));
    CHECK(mark_ready(it, 0, 0, data[0], PL_REPLACE, 1) == PL_DEFERRED);
    CHECK(mark_ready(it, 0, 3, data[3], PL_REPLACE, 1) == PL_DEFERRED);
    CHECK(asked("") && it->reducers[0]->n_posted == 0);
    CHECK(mark_ready(it, 0, 2, data[2], PL_REPLACE, 2) == PL_COPIED);
    CHECK(asked("r1e1 w2e1 c2:2 r2e3 w1e3 i3 r1e1 w2e1 c2:2 r2e4 w1e4 i4 "));
    all_ready_of_rank_1(it);
    close_wait_and_order(it);
    CHECK(all_hold(it, 2));
}

TRACED_TEST(the_close_packs_the_rest_with_zeros_where_there_is_nothing)
{
    gradient data;
    learn(it);
    fill(data, 1);
    CHECK(mark_ready(it, 0, 3, data, PL_REPLACE, 1) == PL_DEFERRED);
    CHECK(mark_ready(it, 0, 0, NULL, PL_REPLACE, 9) == PL_COPIED);
    CHECK_OK(pl_reducer_mark_unused(it->reducers[0], 1, data, PL_REPLACE, PL_UNUSED));
    CHECK_OK(pl_reducer_mark_unused(it->reducers[0], 2, NULL, PL_REPLACE, PL_UNUSED));
    CHECK(asked(""));
    all_ready_of_rank_1(it);
    close_wait_and_order(it);
    CHECK(asked("r1e1 w9e1 c9:2 r9e3 w1e3 i3 c9:2 r9e4 i4 r9e2 i2 h o9 "));
    CHECK(holds(it, 3, 2) && holds(it, 2, 1.5F) && holds(it, 1, 2) &&
          holds(it, 0, 1.5F));
}

TRACED_TEST(what_is_in_its_slot_is_not_moved_but_waited_for)
{
    gradient data;
    learn(it);
    fill(data, 1);
    fill(pair_slot(it, 0, 3), 5);
    CHECK(mark_ready(it, 0, 3, pair_slot(it, 0, 3), PL_IN_PLACE, 2) == PL_COPIED);
    CHECK(mark_ready(it, 0, 2, data, PL_REPLACE, 1) == PL_COPIED);
    CHECK(asked("r2e1 w1e1 c1:1 r1e3 w2e3 i3 "));
    fill(pair_slot(it, 0, 1), 5);
    fill(pair_slot(it, 0, 0), 5);
    CHECK(mark_ready(it, 0, 1, pair_slot(it, 0, 1), PL_IN_PLACE, 1) == PL_COPIED);
    CHECK(mark_ready(it, 0, 0, pair_slot(it, 0, 0), PL_IN_PLACE, 1) == PL_COPIED);
    CHECK(asked("r1e4 i4 ")); /* nothing to move */
    all_ready_of_rank_1(it);
    close_wait_and_order(it);
    CHECK(holds(it, 3, 4) && holds(it, 2, 2) && holds(it, 1, 4));
}

TRACED_TEST(what_is_added_is_added_at_once_behind_what_was_held)
{
    gradient data, more;
    learn(it);
    fill(data, 1);
    fill(more, 10);
    CHECK(mark_ready(it, 0, 3, data, PL_REPLACE, 1) == PL_DEFERRED);
    CHECK(mark_ready(it, 0, 3, NULL, PL_ADD, 2) == PL_COPIED);
    CHECK(asked(""));
    CHECK(mark_ready(it, 0, 3, more, PL_ADD, 1) == PL_COPIED);
    CHECK(asked("c1:1 a1:1 "));
    fill(data, 77); /* the copy was made with it */
    fill(more, 20);
    CHECK(mark_ready(it, 0, 3, more, PL_ADD, 2) == PL_COPIED);
    CHECK(asked("r1e1 w2e1 a2:1 "));
    fill(data, 1);
    CHECK(mark_ready(it, 0, 2, data, PL_REPLACE, 1) == PL_COPIED);
    CHECK(asked("r2e1 w1e1 c1:1 r1e3 w2e3 i3 "));
    all_ready_of_rank_1(it);
    close_wait_and_order(it);
    CHECK(holds(it, 3, 17) && holds(it, 2, 2));
}

TRACED_TEST(what_replaces_comes_behind_what_another_stream_wrote)
{
    gradient data, total;
    learn(it);
    fill(data, 1);
    fill(total, 5);
    CHECK(mark_ready(it, 0, 3, data, PL_REPLACE, 1) == PL_DEFERRED);
    CHECK(mark_ready(it, 0, 3, total, PL_REPLACE, 2) ==
          PL_DEFERRED); /* `data` is NULL */
    CHECK(asked(""));
    fill(data, 77);
    CHECK_OK(pl_reducer_flush(it->reducers[0], 3));
    CHECK(asked("c2:1 "));
    CHECK_OK(pl_reducer_flush(it->reducers[0], 3)); /* it was copied already */
    fill(total, 7);
    CHECK(mark_ready(it, 0, 3, total, PL_REPLACE, 1) == PL_DEFERRED);
    CHECK(asked("r2e1 w1e1 "));
    all_ready_of_rank_1(it);
    for (size_t i = 0; i < 3; i++)
        CHECK_OK(
            pl_reducer_mark_unused(it->reducers[0], i, NULL, PL_REPLACE, PL_UNUSED));
    close_wait_and_order(it);
    CHECK_OK(pl_reducer_flush(it->reducers[0], 3)); /* out of place, and harmless */
    CHECK(holds(it, 3, 5));
}

TRACED_TEST(a_late_gradient_is_moved_between_its_stream_and_the_steps)
{
    gradient data[N_PARAMS], late;
    learn(it);
    all_ready_of_rank_0(it, data, 1);
    all_ready_of_rank_1(it);
    fill(late, 64);
    for (int round = 0; round < 2; round++) {
        CHECK(mark_ready(it, 0, 2, late, PL_ADD, 5) == PL_LATE);
        close_and_wait(it);
        forget_trace();
        CHECK_OK(pl_reducer_write_late(it->reducers[0], 2, late, PL_ADD));
        CHECK(asked("o9 c9:1 r5e1 w9e1 c9:1 r9e1 w5e1 "));
        CHECK_OK(pl_reducer_write_late(it->reducers[1], 2, NULL, PL_ADD));
        close_and_wait(it);
        CHECK(asked("r9e2 i2 b o9 a9:1 "));
        CHECK(holds(it, 2, 34) && holds(it, 3, 2));
        CHECK(tracers[0].n_allocs == 1); /* kept for the next time */
        /* Another step, in which it comes twice again after one in which it did not. */
        end_both(it);
        for (int k = 0; k < 2; k++) {
            begin_both(it);
            all_ready_of_rank_0(it, data, 1);
            all_ready_of_rank_1(it);
            if (k == 0) {
                close_and_wait(it);
                end_both(it);
            }
        }
    }
}

TRACED_TEST(a_stream_is_ordered_once_behind_the_same_means)
{
    learn(it);
    CHECK(pl_reducer_order(it->reducers[0]) == PL_ESTATE);
    all_ready_of_rank_1(it);
    CHECK_OK(pl_reducer_shadow_step(it->reducers[0], PL_JOINING));
    close_wait_and_order(it);
    CHECK(asked("c9:2 r9e3 i3 c9:2 r9e4 i4 r9e2 i2 h o9 "));
    CHECK_OK(pl_reducer_order(it->reducers[0]));
    pl_reducer_set_stream(it->reducers[0], stream(9));
    CHECK_OK(pl_reducer_rescale(it->reducers[0]));
    CHECK_OK(pl_reducer_rescale(it->reducers[1]));
    CHECK(asked("s9:4 "));
    CHECK(holds(it, 0, 3));
    pl_reducer_set_stream(it->reducers[0], stream(4));
    CHECK_OK(pl_reducer_order(it->reducers[0]));
    CHECK(asked("o4 "));
    end_both(it);
}

TRACED_TEST(means_are_rescaled_behind_the_operations_that_make_them)
{
    learn(it);
    all_ready_of_rank_1(it);
    CHECK_OK(pl_reducer_shadow_step(it->reducers[0], PL_JOINING));
    close_and_wait(it);
    forget_trace();
    CHECK_OK(pl_reducer_rescale(it->reducers[0]));
    CHECK(asked("o9 s9:4 "));
}

TRACED_TEST(each_of_more_buckets_has_an_event)
{
    static const pl_plan_caps alone = {.bucket_bytes = 64, .last_bytes = 64};
    gradient data[N_PARAMS];
    for (int r = 0; r < N_RANKS; r++)
        CHECK_OK(
            pl_reducer_set_comm_hook(it->reducers[r], &(pl_comm_hook){NULL}, &alone));
    learn(it);
    all_ready_of_rank_0(it, data, 1);
    CHECK(asked("c1:1 r1e3 i3 c1:1 r1e4 i4 c1:1 r1e5 i5 c1:1 r1e6 i6 "));
}

TRACED_TEST(host_memory_of_another_size_than_the_header_is_refused)
{
    (void)it;
    pl_reducer *reducer = NULL;
    tracers[0].comm.host_bytes += 64;
    CHECK_FAILS(
        pl_reducer_create(&spec, &tracers[0].comm, &tracers[0].backend, &reducer),
        PL_EINVAL, "of a reducer's header");
    CHECK(reducer == NULL);
}
