/* test_reducer_pack_failure.c - moves deferred in steps that fail, at any call. */
#include "tracer.h"

/* A step with two streams, more than one gradient for a parameter, and a late one;
 * stops at the first failure. */
static pl_status busy_step(pair *it, gradient *data)
{
    pl_reducer *one = it->reducers[0];
    pl_ready_result result;
    pl_status st = pl_reducer_begin(one);
    for (size_t i = N_PARAMS; i-- > 0 && st == PL_OK;)
        st = pl_reducer_mark_ready(one, i, data[i], PL_REPLACE, stream(1 + (int)i % 2),
                                   &result);
    if (st == PL_OK)
        st = pl_reducer_mark_ready(one, 2, data[2], PL_ADD, stream(2), &result);
    all_ready_of_rank_1(it);
    if (st == PL_OK)
        st = pl_reducer_close(one);
    (void)!pl_reducer_close(it->reducers[1]);
    for (int round = 0; round < 2 && st == PL_OK; round++) {
        CHECK_OK(pl_comm_progress(it->comms[1]));
        st = pl_reducer_wait(one, RANKS_SLICE_NS);
        (void)!pl_reducer_wait(it->reducers[1], RANKS_SLICE_NS);
        if (round == 1 || pl_reducer_n_late(one) == 0 || st != PL_OK)
            break;
        st = pl_reducer_write_late(one, 2, data[2], PL_ADD);
        (void)!pl_reducer_write_late(it->reducers[1], 2, NULL, PL_ADD);
        if (st == PL_OK)
            st = pl_reducer_close(one);
        (void)!pl_reducer_close(it->reducers[1]);
    }
    return st == PL_OK ? pl_reducer_order(one) : st;
}

static int nth_to_fail; /* of the backend's calls; 0: the whole step came before it */

static void fail_once(pair *it)
{
    gradient data[N_PARAMS];
    learn(it);
    all_ready_of_rank_1(it); /* in the step that has begun */
    CHECK_OK(pl_reducer_shadow_step(it->reducers[0], PL_SHADOWING));
    close_wait_and_order(it);
    end_both(it);
    for (size_t i = 0; i < N_PARAMS; i++)
        fill(data[i], 1);
    CHECK_OK(pl_reducer_begin(it->reducers[1]));
    tracers[0].fail_at = nth_to_fail;
    const pl_status st = busy_step(it, data);
    const int has_failed = tracers[0].fail_at == 0;
    tracers[0].fail_at = 0;
    CHECK(st == (has_failed ? PL_ESYS : PL_OK));
    if (has_failed) {
        pl_reducer_fail(it->reducers[0], "no memory for this");
        CHECK_FAILS(pl_reducer_notice_failure(it->reducers[1]), PL_EPEER,
                    "no memory for this");
    }
    for (size_t i = 0; i < N_PARAMS && !has_failed; i++)
        CHECK(holds(it, i, i == 2 ? 2.5F : 2));
    nth_to_fail = has_failed ? nth_to_fail + 1 : 0;
}

TEST(any_call_that_fails_fails_the_step_and_leaves_nothing)
{
    int n = 0;
    for (nth_to_fail = 1; nth_to_fail > n; n++)
        traced_run(fail_once);
    CHECK(n > 20);
}

TRACED_TEST(a_reducer_without_its_events_is_not_made_and_leaves_none)
{
    (void)it;
    pl_reducer *reducer = NULL;
    pl_status st = PL_ESYS;
    tracer *first = &tracers[0];
    const size_t n_events = first->n_live_events;
    for (int n = 1; st == PL_ESYS; n++) {
        first->fail_at = n;
        st = pl_reducer_create(&spec, &first->comm, &first->backend, &reducer);
        CHECK(st == PL_OK || first->n_live_events == n_events);
        CHECK((st == PL_OK) == (n > 4)); /* two of its own, and one per bucket */
    }
    pl_reducer_destroy(reducer);
    first->fail_at = 0;
}
