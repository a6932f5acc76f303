/* test_reducer_comm_hook.c - buckets that a hook averages in place of the world.
 *
 * One thread plays both ranks.  The hook of these tests notes which buckets it was
 * given and what was in them, and doubles them before the end of the step.
 */
#include "core/alloc.h"
#include "steps.h"

enum { N_RANKS = 2, N_PARAMS = 6, N_ELEMS = 16 }; /* a cache line of float32 each */

typedef struct hook_of_rank {
    pl_comm *comm;
    pl_reducer *reducer;
    size_t n_posted; /* in this step */
    size_t posted[N_PARAMS];
    size_t fail_at; /* the bucket refused; SIZE_MAX: none */
} hook_of_rank;

typedef struct pair {
    pl_comm *comms[N_RANKS];
    pl_backend *backend;
    hook_of_rank ranks[N_RANKS];
} pair;

static const pl_param params[N_PARAMS] = {{N_ELEMS, PL_F32}, {N_ELEMS, PL_F32},
                                          {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32},
                                          {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}};
static const pl_plan_caps two_each = {.bucket_bytes = 128, .last_bytes = 128};
static const pl_plan_caps three_each = {.bucket_bytes = 192, .last_bytes = 192};

static float *slot_of(const hook_of_rank *self, size_t param)
{
    return (float *)(void *)((char *)pli_comm_arena(self->comm) +
                             pl_reducer_slot_offset(self->reducer, param));
}

/* A bucket is whole when it comes: each slot holds parameter + 1. */
static pl_status post(void *context, size_t bucket)
{
    pl_status st = PL_OK;
    hook_of_rank *self = context;
    const pl_bucket_plan *plan = &pl_reducer_plan(self->reducer)->buckets[bucket];
    if (bucket == self->fail_at)
        PL_FAIL(PL_ESTATE, "bucket %zu is not wanted", bucket);
    CHECK(bucket == self->n_posted);
    for (size_t m = 0; m < plan->n_params; m++)
        CHECK(*slot_of(self, plan->params[m]) == (float)(plan->params[m] + 1));
    self->posted[self->n_posted++] = bucket;
done:
    return st;
}

static pl_status set(hook_of_rank *self, const pl_plan_caps *caps)
{
    const pl_comm_hook hook = {.context = self, .post = post};
    return pl_reducer_set_comm_hook(self->reducer, &hook, caps);
}

static int pair_create(pair *out)
{
    const pl_reducer_spec spec = {
        .params = params, .n_params = N_PARAMS, .caps = two_each};
    *out = (pair){.backend = NULL};
    if (!CHECK_OK(pli_cpu_backend_create(&out->backend)) ||
        !CHECK_OK(pl_local_create(N_RANKS, pl_reducer_arena_bytes(&spec),
                                  RANKS_DEADLINE_NS, out->comms)))
        return 0;
    for (int r = 0; r < N_RANKS; r++) {
        hook_of_rank *rank = &out->ranks[r];
        *rank = (hook_of_rank){.comm = out->comms[r], .fail_at = SIZE_MAX};
        if (!CHECK_OK(
                pl_reducer_create(&spec, rank->comm, out->backend, &rank->reducer)))
            return 0;
    }
    return 1;
}

static void set_all(pair *it, const pl_plan_caps *caps)
{
    for (int r = 0; r < N_RANKS; r++)
        CHECK_OK(set(&it->ranks[r], caps));
}

static void pair_destroy(pair *it)
{
    for (int r = 0; r < N_RANKS; r++) {
        pl_reducer_destroy(it->ranks[r].reducer);
        pl_comm_destroy(it->comms[r]);
    }
    pli_backend_destroy(it->backend);
}

static pl_status mark_ready(hook_of_rank *self, size_t param, pl_ready_result *out)
{
    float data[N_ELEMS];
    for (size_t i = 0; i < N_ELEMS; i++)
        data[i] = (float)(param + 1);
    return pl_reducer_mark_ready(self->reducer, param, data, PL_REPLACE, NULL, out);
}

static void begin(pair *it)
{
    for (int r = 0; r < N_RANKS; r++) {
        it->ranks[r].n_posted = 0;
        CHECK_OK(pl_reducer_begin(it->ranks[r].reducer));
    }
}

/* Closes, and ends the step with twice what each slot holds. */
static void finish(pair *it)
{
    for (int r = 0; r < N_RANKS; r++)
        CHECK_OK(pl_reducer_close(it->ranks[r].reducer));
    for (int r = 0; r < N_RANKS; r++) {
        hook_of_rank *rank = &it->ranks[r];
        CHECK_OK(pl_comm_progress(it->comms[1 - r]));
        CHECK_OK(pl_reducer_wait(rank->reducer, RANKS_SLICE_NS));
        CHECK(rank->n_posted == pl_reducer_plan(rank->reducer)->n_buckets);
        for (size_t i = 0; i < N_PARAMS; i++) {
            CHECK(pl_reducer_is_used(rank->reducer, i));
            *slot_of(rank, i) *= 2;
            CHECK(*slot_of(rank, i) == (float)(2 * (i + 1)));
        }
        CHECK_OK(pl_reducer_end(rank->reducer));
    }
}

/* A whole step, in the order given on rank 0 and backwards on rank 1. */
static void step_in_order(pair *it, const uint32_t *order)
{
    pl_ready_result result = PL_LATE;
    begin(it);
    for (size_t k = 0; k < N_PARAMS; k++) {
        CHECK_OK(mark_ready(&it->ranks[0], order[k], &result));
        CHECK(result == PL_COPIED);
        CHECK_OK(mark_ready(&it->ranks[1], N_PARAMS - 1 - k, &result));
        CHECK(result == PL_COPIED);
    }
    finish(it);
}

static const uint32_t upward[N_PARAMS] = {0, 1, 2, 3, 4, 5};

TEST(nothing_is_posted_before_the_close_of_the_first_step)
{
    pl_ready_result result = PL_LATE;
    pair it;
    if (!pair_create(&it))
        return;
    set_all(&it, &three_each);
    begin(&it);
    for (size_t i = 0; i < N_PARAMS; i++)
        for (int r = 0; r < N_RANKS; r++)
            CHECK_OK(mark_ready(&it.ranks[r], i, &result));
    CHECK(it.ranks[0].n_posted == 0);
    finish(&it);
    CHECK(it.ranks[0].n_posted == 2);
    pair_destroy(&it);
}

TEST(whole_buckets_are_posted_in_order_as_they_fill)
{
    pl_ready_result result = PL_LATE;
    pair it;
    if (!pair_create(&it))
        return;
    set_all(&it, &three_each);
    step_in_order(&it, upward);
    begin(&it); /* 0 1 2 | 3 4 5 */
    for (size_t i = 3; i < N_PARAMS; i++)
        CHECK_OK(mark_ready(&it.ranks[0], i, &result));
    CHECK(it.ranks[0].n_posted == 0); /* the second is full, the first is not */
    CHECK_OK(mark_ready(&it.ranks[0], 0, &result));
    CHECK_OK(mark_ready(&it.ranks[0], 1, &result));
    CHECK(it.ranks[0].n_posted == 0);
    CHECK_OK(mark_ready(&it.ranks[0], 2, &result));
    CHECK(it.ranks[0].n_posted == 2);
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK_OK(mark_ready(&it.ranks[1], i, &result));
    finish(&it);
    pair_destroy(&it);
}

TEST(the_world_moves_no_gradient_of_a_carriers)
{
    pair it;
    if (!pair_create(&it))
        return;
    set_all(&it, &two_each);
    for (int k = 0; k < 3; k++)
        step_in_order(&it, upward); /* finish() sees each rank's own, doubled */
    pair_destroy(&it);
}

TEST(a_gradient_behind_its_bucket_is_late_on_every_rank)
{
    pl_ready_result result = PL_COPIED;
    pair it;
    if (!pair_create(&it))
        return;
    set_all(&it, &two_each);
    step_in_order(&it, upward);
    begin(&it);
    for (size_t i = 0; i < N_PARAMS; i++)
        for (int r = 0; r < N_RANKS; r++)
            CHECK_OK(mark_ready(&it.ranks[r], i, &result));
    CHECK_OK(mark_ready(&it.ranks[1], 0, &result));
    CHECK(result == PL_LATE);
    for (int r = 0; r < N_RANKS; r++)
        CHECK_OK(pl_reducer_close(it.ranks[r].reducer));
    CHECK_OK(pl_comm_progress(it.comms[1]));
    for (int r = 0; r < N_RANKS; r++) {
        CHECK_OK(pl_reducer_wait(it.ranks[r].reducer, RANKS_SLICE_NS));
        CHECK(pl_reducer_n_late(it.ranks[r].reducer) == 1);
        CHECK(pl_reducer_is_late(it.ranks[r].reducer, 0));
    }
    pair_destroy(&it);
}

TEST(a_carrier_lays_buckets_out_anew_and_keeps_what_was_learned)
{
    static const uint32_t order[N_PARAMS] = {4, 1, 3, 0, 2, 5};
    pair it;
    if (!pair_create(&it))
        return;
    CHECK(pl_reducer_plan(it.ranks[0].reducer)->n_buckets == 3);
    set_all(&it, &three_each);
    const pl_plan *plan = pl_reducer_plan(it.ranks[0].reducer);
    CHECK(plan->n_buckets == 2 && plan->members[0] == N_PARAMS - 1);
    CHECK(pl_reducer_generation(it.ranks[0].reducer) == 1);
    step_in_order(&it, order);
    set_all(&it, &two_each); /* what the step has shown is taken up all the same */
    step_in_order(&it, order);
    CHECK(memcmp(pl_reducer_plan(it.ranks[1].reducer)->members, order, sizeof order) ==
          0);
    set_all(&it, &three_each);
    plan = pl_reducer_plan(it.ranks[1].reducer);
    CHECK(plan->n_buckets == 2);
    CHECK(memcmp(plan->members, order, sizeof order) == 0);
    step_in_order(&it, order);
    pair_destroy(&it);
}

TEST(a_carrier_has_caps_of_its_own)
{
    size_t each[2] = {64, 128};
    const pl_plan_caps caps = {.each = each, .n_each = 2};
    pair it;
    if (!pair_create(&it))
        return;
    set_all(&it, &caps);
    each[0] = each[1] = 1 << 20; /* they were copied */
    step_in_order(&it, upward);
    step_in_order(&it, upward);
    const pl_plan *plan = pl_reducer_plan(it.ranks[0].reducer);
    CHECK(plan->n_buckets == 4); /* 0 | 1 2 | 3 4 | 5 */
    CHECK(plan->buckets[0].n_params == 1 && plan->buckets[1].n_params == 2);
    set_all(&it, &two_each);
    CHECK(pl_reducer_plan(it.ranks[0].reducer)->n_buckets == 3);
    pair_destroy(&it);
}

TEST(a_carrier_is_refused_while_a_step_is_under_way_or_has_failed)
{
    pair it;
    if (!pair_create(&it))
        return;
    begin(&it);
    CHECK_FAILS(set(&it.ranks[0], &three_each), PL_ESTATE, "while a step is under way");
    CHECK(pl_reducer_plan(it.ranks[0].reducer)->n_buckets == 3);
    pl_reducer_fail(it.ranks[0].reducer, "no reason");
    CHECK(set(&it.ranks[0], &three_each) == PL_ESTATE);
    CHECK(pl_reducer_generation(it.ranks[0].reducer) == 0);
    pair_destroy(&it);
}

TEST(a_carrier_that_cannot_be_set_changes_nothing)
{
    static const size_t each[] = {64};
    const pl_plan_caps caps = {.each = each, .n_each = 1};
    pair it;
    if (!pair_create(&it))
        return;
    for (long n = 1; CHECK(n < 50); n++) {
        pli_fault_arm(PLI_FAULT_ALLOC, n);
        const pl_status st = set(&it.ranks[0], &caps);
        pli_fault_arm(PLI_FAULT_ALLOC, 0);
        if (st == PL_OK) {
            CHECK(n > 2);
            break;
        }
        CHECK(st == PL_ENOMEM);
        CHECK(pl_reducer_plan(it.ranks[0].reducer)->n_buckets == 3);
        CHECK(pl_reducer_generation(it.ranks[0].reducer) == 0);
    }
    CHECK_OK(set(&it.ranks[1], &caps));
    step_in_order(&it, upward);
    step_in_order(&it, upward);
    CHECK(pl_reducer_plan(it.ranks[0].reducer)->n_buckets == N_PARAMS);
    pair_destroy(&it);
}

TEST(what_a_carrier_refuses_fails_the_step)
{
    pl_ready_result result = PL_LATE;
    pair it;
    if (!pair_create(&it))
        return;
    set_all(&it, &two_each);
    step_in_order(&it, upward);
    it.ranks[0].fail_at = 1;
    begin(&it);
    for (size_t i = 0; i < 3; i++)
        CHECK_OK(mark_ready(&it.ranks[0], i, &result));
    CHECK_FAILS(mark_ready(&it.ranks[0], 3, &result), PL_ESTATE,
                "bucket 1 is not wanted");
    pl_reducer_fail(it.ranks[0].reducer, "bucket 1 is not wanted");
    for (size_t i = 0; i < N_PARAMS; i++)
        (void)!mark_ready(&it.ranks[1], i, &result);
    CHECK_FAILS(pl_reducer_close(it.ranks[1].reducer), PL_EPEER,
                "bucket 1 is not wanted");
    pl_reducer_fail(it.ranks[1].reducer, NULL);
    it.ranks[0].fail_at = SIZE_MAX;
    CHECK(pl_reducer_recover(it.ranks[0].reducer, 0) == PL_EAGAIN);
    CHECK_OK(pl_reducer_recover(it.ranks[1].reducer, RANKS_SLICE_NS));
    CHECK_OK(pl_reducer_recover(it.ranks[0].reducer, RANKS_SLICE_NS));
    step_in_order(&it, upward);
    step_in_order(&it, upward);
    pair_destroy(&it);
}

/* ---- ranks that are gone, for whoever waits by other means ---------------------- */

TEST(a_look_shows_who_has_failed_or_left)
{
    pl_recovery recovery = PL_NOTHING_FAILED;
    pair it;
    if (!pair_create(&it))
        return;
    CHECK(!pli_comm_is_group_comm(it.comms[0]));
    CHECK_OK(pli_comm_check_peers(it.comms[0]));
    pl_comm_abort(it.comms[1], "a bad dream");
    CHECK(pli_comm_check_peers(it.comms[0]) == PL_EPEER);
    CHECK(blames(pl_error_message(), 0, 1) && error_has("a bad dream"));
    CHECK(pl_comm_recover(it.comms[0], 0, &recovery) == PL_EAGAIN);
    CHECK_OK(recover_through(it.comms[1], &recovery));
    CHECK_OK(recover_through(it.comms[0], &recovery));
    CHECK_OK(pli_comm_check_peers(it.comms[0]));
    pl_comm_leave(it.comms[1]);
    CHECK(pli_comm_check_peers(it.comms[0]) == PL_EPEER);
    CHECK(blames(pl_error_message(), 0, 1) && error_has("has left"));
    pair_destroy(&it);
}
