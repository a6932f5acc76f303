/* test_reducer_comm_hook.c - buckets that a hook averages in place of the world.
 *
 * One thread drives both ranks.  The hook of these tests records its buckets and their
 * data, and doubles them before the end of the step.
 */
#include "core/alloc.h"
#include "reducer_pair.h"

enum { N_RANKS = 2, N_PARAMS = 6, N_ELEMS = 16 }; /* a cache line of float32 each */

static const pl_param params[N_PARAMS] = {{N_ELEMS, PL_F32}, {N_ELEMS, PL_F32},
                                          {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32},
                                          {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}};
static const pl_plan_caps two_each = {.bucket_bytes = 128, .last_bytes = 128};
static const pl_plan_caps three_each = {.bucket_bytes = 192, .last_bytes = 192};

static const pl_reducer_spec spec = {
    .params = params, .n_params = N_PARAMS, .caps = two_each};

typedef struct hook_of_rank {
    const pair *both;
    int rank;
    size_t n_posted; /* in this step */
    size_t fail_at;  /* the bucket that it refuses; SIZE_MAX: none */
    pl_ready_result result;
} hook_of_rank;

static hook_of_rank hooks[N_RANKS]; /* of the one pair */

/* A bucket is complete when it is posted: each slot holds parameter + 1. */
static pl_status post(void *context, size_t bucket)
{
    pl_status st = PL_OK;
    hook_of_rank *self = context;
    const pl_plan *plan = self->both->reducers[self->rank]->plan;
    const pl_bucket_plan *posted = &plan->buckets[bucket];
    if (bucket == self->fail_at)
        PL_FAIL(PL_ESTATE, "bucket %zu is not wanted", bucket);
    CHECK(bucket == self->n_posted++);
    for (size_t m = 0; m < posted->n_params; m++)
        CHECK(*pair_slot(self->both, self->rank, posted->params[m]) ==
              (float)(posted->params[m] + 1));
done:
    return st;
}

static pl_status set(const pair *it, int rank, const pl_plan_caps *caps)
{
    const pl_comm_hook hook = {.context = &hooks[rank], .post = post};
    return pl_reducer_set_comm_hook(it->reducers[rank], &hook, caps);
}

static void set_both(const pair *it, const pl_plan_caps *caps)
{
    for (int r = 0; r < N_RANKS; r++)
        CHECK_OK(set(it, r, caps));
}

static void run_hooked(void (*run)(pair *it))
{
    pair it;
    if (!CHECK_OK(pair_create(&spec, &it)))
        return;
    for (int r = 0; r < N_RANKS; r++)
        hooks[r] = (hook_of_rank){.both = &it, .rank = r, .fail_at = SIZE_MAX};
    run(&it);
    pair_destroy(&it);
}

/* A test with a pair of such reducers. */
#define PAIR_TEST(name) TEST_BY(name, pair *it, run_hooked(name##_by))

static pl_status mark_ready(const pair *it, int rank, size_t param)
{
    float data[N_ELEMS];
    for (size_t i = 0; i < N_ELEMS; i++)
        data[i] = (float)(param + 1);
    return pl_reducer_mark_ready(it->reducers[rank], param, data, PL_REPLACE, NULL,
                                 &hooks[rank].result);
}

static void begin(const pair *it)
{
    hooks[0].n_posted = hooks[1].n_posted = 0;
    begin_both(it);
}

/* Closes, and ends the step with twice the value of each slot. */
static void finish(const pair *it)
{
    close_and_wait(it);
    for (int r = 0; r < N_RANKS; r++) {
        CHECK(hooks[r].n_posted == it->reducers[r]->plan->n_buckets);
        for (size_t i = 0; i < N_PARAMS; i++) {
            CHECK(pl_reducer_is_used(it->reducers[r], i));
            *pair_slot(it, r, i) *= 2;
            CHECK(*pair_slot(it, r, i) == (float)(2 * (i + 1)));
        }
    }
    end_both(it);
}

/* A whole step, in the given order on rank 0 and backwards on rank 1. */
static void step_in_order(const pair *it, const uint32_t *order)
{
    begin(it);
    for (size_t k = 0; k < N_PARAMS; k++) {
        CHECK_OK(mark_ready(it, 0, order[k]));
        CHECK_OK(mark_ready(it, 1, N_PARAMS - 1 - k));
        CHECK(hooks[0].result == PL_COPIED && hooks[1].result == PL_COPIED);
    }
    finish(it);
}

static const uint32_t upward[N_PARAMS] = {0, 1, 2, 3, 4, 5};

PAIR_TEST(nothing_is_posted_before_the_close_of_the_first_step)
{
    set_both(it, &three_each);
    begin(it);
    for (size_t i = 0; i < N_PARAMS; i++)
        for (int r = 0; r < N_RANKS; r++)
            CHECK_OK(mark_ready(it, r, i));
    CHECK(hooks[0].n_posted == 0);
    finish(it);
    CHECK(hooks[0].n_posted == 2);
}

PAIR_TEST(whole_buckets_are_posted_in_order_as_they_fill)
{
    set_both(it, &three_each);
    step_in_order(it, upward);
    begin(it); /* 0 1 2 | 3 4 5 */
    for (size_t i = 3; i < N_PARAMS; i++)
        CHECK_OK(mark_ready(it, 0, i));
    CHECK(hooks[0].n_posted == 0); /* the second is full, the first is not */
    CHECK_OK(mark_ready(it, 0, 0));
    CHECK_OK(mark_ready(it, 0, 1));
    CHECK(hooks[0].n_posted == 0);
    CHECK_OK(mark_ready(it, 0, 2));
    CHECK(hooks[0].n_posted == 2);
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK_OK(mark_ready(it, 1, i));
    finish(it);
}

PAIR_TEST(the_world_moves_no_gradient_of_a_carriers)
{
    set_both(it, &two_each);
    for (int k = 0; k < 3; k++)
        step_in_order(it, upward); /* finish() checks each rank's own, doubled */
}

PAIR_TEST(a_gradient_behind_its_bucket_is_late_on_every_rank)
{
    set_both(it, &two_each);
    step_in_order(it, upward);
    begin(it);
    for (size_t i = 0; i < N_PARAMS; i++)
        for (int r = 0; r < N_RANKS; r++)
            CHECK_OK(mark_ready(it, r, i));
    CHECK_OK(mark_ready(it, 1, 0));
    CHECK(hooks[1].result == PL_LATE);
    close_and_wait(it);
    for (int r = 0; r < N_RANKS; r++) {
        CHECK(pl_reducer_n_late(it->reducers[r]) == 1);
        CHECK(pl_reducer_is_late(it->reducers[r], 0));
    }
}

PAIR_TEST(a_carrier_lays_buckets_out_anew_and_keeps_what_was_learned)
{
    static const uint32_t order[N_PARAMS] = {4, 1, 3, 0, 2, 5};
    CHECK(it->reducers[0]->plan->n_buckets == 3);
    set_both(it, &three_each);
    const pl_plan *plan = it->reducers[0]->plan;
    CHECK(plan->n_buckets == 2 && plan->members[0] == N_PARAMS - 1);
    CHECK(it->reducers[0]->generation == 1);
    step_in_order(it, order);
    set_both(it, &two_each); /* the order of the step is adopted all the same */
    step_in_order(it, order);
    CHECK(memcmp(it->reducers[1]->plan->members, order, sizeof order) == 0);
    set_both(it, &three_each);
    plan = it->reducers[1]->plan;
    CHECK(plan->n_buckets == 2);
    CHECK(memcmp(plan->members, order, sizeof order) == 0);
    step_in_order(it, order);
}

PAIR_TEST(a_carrier_has_caps_of_its_own)
{
    size_t each[2] = {64, 128};
    const pl_plan_caps caps = {.each = each, .n_each = 2};
    set_both(it, &caps);
    each[0] = each[1] = 1 << 20; /* they were copied */
    step_in_order(it, upward);
    step_in_order(it, upward);
    const pl_plan *plan = it->reducers[0]->plan;
    CHECK(plan->n_buckets == 4); /* 0 | 1 2 | 3 4 | 5 */
    CHECK(plan->buckets[0].n_params == 1 && plan->buckets[1].n_params == 2);
    set_both(it, &two_each);
    CHECK(it->reducers[0]->plan->n_buckets == 3);
}

PAIR_TEST(a_carrier_is_refused_while_a_step_is_under_way_or_has_failed)
{
    begin(it);
    CHECK_FAILS(set(it, 0, &three_each), PL_ESTATE, "during a step");
    CHECK(it->reducers[0]->plan->n_buckets == 3);
    pl_reducer_fail(it->reducers[0], "no reason");
    CHECK(set(it, 0, &three_each) == PL_ESTATE);
    CHECK(it->reducers[0]->generation == 0);
}

PAIR_TEST(a_carrier_that_cannot_be_set_changes_nothing)
{
    static const size_t each[] = {64};
    const pl_plan_caps caps = {.each = each, .n_each = 1};
    for (long n = 1; CHECK(n < 50); n++) {
        pli_fault_arm(PLI_FAULT_ALLOC, n);
        const pl_status st = set(it, 0, &caps);
        pli_fault_arm(PLI_FAULT_ALLOC, 0);
        if (st == PL_OK) {
            CHECK(n > 2);
            break;
        }
        CHECK(st == PL_ENOMEM);
        CHECK(it->reducers[0]->plan->n_buckets == 3);
        CHECK(it->reducers[0]->generation == 0);
    }
    CHECK_OK(set(it, 1, &caps));
    step_in_order(it, upward);
    step_in_order(it, upward);
    CHECK(it->reducers[0]->plan->n_buckets == N_PARAMS);
}

PAIR_TEST(what_a_carrier_refuses_fails_the_step)
{
    set_both(it, &two_each);
    step_in_order(it, upward);
    hooks[0].fail_at = 1;
    begin(it);
    for (size_t i = 0; i < 3; i++)
        CHECK_OK(mark_ready(it, 0, i));
    CHECK_FAILS(mark_ready(it, 0, 3), PL_ESTATE, "bucket 1 is not wanted");
    pl_reducer_fail(it->reducers[0], "bucket 1 is not wanted");
    for (size_t i = 0; i < N_PARAMS; i++)
        (void)!mark_ready(it, 1, i);
    CHECK_FAILS(pl_reducer_close(it->reducers[1]), PL_EPEER, "bucket 1 is not wanted");
}

/* ---- queries of ranks that are gone --------------------------------------------- */

PAIR_TEST(a_look_shows_who_has_failed)
{
    CHECK(!pli_comm_is_group_comm(it->comms[0]));
    CHECK_OK(pli_comm_check_peers(it->comms[0]));
    pl_comm_abort(it->comms[1], "a bad dream");
    CHECK(pli_comm_check_peers(it->comms[0]) == PL_EPEER);
    CHECK(blames(pl_error_message(), 0, 1) && error_has("a bad dream"));
    pl_comm_leave(it->comms[1]); /* the first failure stays */
    CHECK(pli_comm_check_peers(it->comms[0]) == PL_EPEER);
    CHECK(error_has("a bad dream"));
}

PAIR_TEST(a_look_shows_who_has_left)
{
    pl_comm_leave(it->comms[1]);
    CHECK(pli_comm_check_peers(it->comms[0]) == PL_EPEER);
    CHECK(blames(pl_error_message(), 0, 1) && error_has("has left"));
}
