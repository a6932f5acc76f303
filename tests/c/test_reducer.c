/* test_reducer.c - single steps by hand: when buckets are posted, what is late, what is
 * learned, and which calls are out of place.
 *
 * One thread drives both ranks, so that all happens in the order written here.  Steps
 * at random are in test_step_drawn.c and test_step_device.c.
 */
#include "reducer_pair.h"

enum { N_RANKS = 2, N_PARAMS = 4, N_ELEMS = 16 }; /* a cache line of float32 each */

/* Buckets of two parameters each: 3 2 | 1 0 at first. */
static const pl_param params[N_PARAMS] = {
    {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}};
static const pl_reducer_spec spec = {.params = params,
                                     .n_params = N_PARAMS,
                                     .caps = {.bucket_bytes = 128, .last_bytes = 128}};

/* A test with a pair of such reducers. */
#define PAIR_TEST(name) TEST_BY(name, pair *it, pair_run(&spec, name##_by))

static pl_ready_result mark_ready(const pair *it, int rank, size_t param, float value,
                                  pl_write_mode mode)
{
    float data[N_ELEMS];
    pl_ready_result result = PL_LATE;
    for (size_t i = 0; i < N_ELEMS; i++)
        data[i] = value;
    CHECK_OK(
        pl_reducer_mark_ready(it->reducers[rank], param, data, mode, NULL, &result));
    return result;
}

static int holds(const pair *it, size_t param, float value)
{
    int is_held = 1;
    for (int r = 0; r < N_RANKS; r++)
        for (size_t i = 0; i < it->reducers[r]->params[param].n_elems; i++)
            is_held &= pair_slot(it, r, param)[i] == value;
    return is_held;
}

/* Marks every parameter once on both ranks, in the order given for rank 0. */
static void step_in_order(const pair *it, const uint32_t *order)
{
    begin_both(it);
    for (size_t k = 0; k < N_PARAMS; k++) {
        CHECK(mark_ready(it, 0, order[k], 1, PL_REPLACE) == PL_COPIED);
        CHECK(mark_ready(it, 1, N_PARAMS - 1 - k, 3, PL_REPLACE) == PL_COPIED);
    }
    close_and_wait(it);
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK(holds(it, i, 2));
    end_both(it);
}

/* ---- learning ------------------------------------------------------------------- */

PAIR_TEST(the_second_step_lays_buckets_out_in_the_order_of_rank_0)
{
    static const uint32_t order[N_PARAMS] = {1, 3, 0, 2};
    step_in_order(it, order);
    CHECK(it->reducers[1]->generation == 0);
    CHECK(it->reducers[1]->plan->members[0] == 3);
    step_in_order(it, order);
    for (int r = 0; r < N_RANKS; r++) {
        const pl_plan *plan = it->reducers[r]->plan;
        CHECK(it->reducers[r]->generation == 1);
        CHECK(memcmp(plan->members, order, sizeof order) == 0);
    }
    step_in_order(it, order);
    CHECK(it->reducers[0]->generation == 1);
}

/* Rank 0's gradients are summed while they are copied; rank 1's are in their slots. */
static void stream_on_rank_0(pair *it)
{
    static const uint32_t order[N_PARAMS] = {3, 2, 1, 0};
    pl_ready_result result = PL_LATE;
    for (int k = 0; k < 2; k++)
        step_in_order(it, order);
    begin_both(it);
    for (size_t i = N_PARAMS; i-- > 0;) {
        float *slot = pair_slot(it, 1, i);
        for (size_t k = 0; k < it->reducers[1]->params[i].n_elems; k++)
            slot[k] = 3;
        CHECK_OK(pl_reducer_mark_ready(it->reducers[1], i, slot, PL_IN_PLACE, NULL,
                                       &result));
        CHECK(mark_ready(it, 0, i, 1, PL_REPLACE) == PL_COPIED);
    }
    close_and_wait(it);
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK(holds(it, i, 2));
}

TEST(a_gradient_alone_in_its_bucket_may_be_without_elements)
{
    static const pl_param hollow[N_PARAMS] = {
        {0, PL_F32}, {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}};
    pl_reducer_spec alone = spec;
    alone.params = hollow;
    alone.caps = (pl_plan_caps){.bucket_bytes = 1, .last_bytes = 1};
    pair_run(&alone, stream_on_rank_0);
}

PAIR_TEST(the_parameters_that_no_gradient_came_for_are_counted)
{
    begin_both(it);
    for (size_t i = 0; i < N_PARAMS; i++) {
        CHECK(it->reducers[0]->spec.n_params - it->reducers[0]->n_ready_params ==
              N_PARAMS - i);
        CHECK(mark_ready(it, 0, i, 1, PL_REPLACE) == PL_COPIED);
        CHECK(mark_ready(it, 0, i, 1, PL_ADD) == PL_COPIED); /* twice counts once */
    }
    CHECK(it->reducers[0]->spec.n_params - it->reducers[0]->n_ready_params == 0);
    CHECK(it->reducers[1]->spec.n_params - it->reducers[1]->n_ready_params == N_PARAMS);
}

/* ---- late gradients ------------------------------------------------------------- */

static void learn(const pair *it)
{
    static const uint32_t order[N_PARAMS] = {3, 2, 1, 0};
    step_in_order(it, order);
}

PAIR_TEST(a_gradient_behind_its_bucket_is_late_and_the_bucket_stays)
{
    learn(it);
    begin_both(it);
    CHECK(mark_ready(it, 0, 3, 1, PL_REPLACE) == PL_COPIED);
    CHECK(mark_ready(it, 0, 3, 1, PL_ADD) == PL_COPIED); /* 2 is not in yet */
    CHECK(mark_ready(it, 0, 2, 1, PL_REPLACE) == PL_COPIED);
    CHECK(mark_ready(it, 0, 2, 64, PL_ADD) == PL_LATE);
    CHECK(mark_ready(it, 0, 1, 1, PL_REPLACE) == PL_COPIED);
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK(mark_ready(it, 1, i, 1, PL_REPLACE) == PL_COPIED);
    CHECK(mark_ready(it, 0, 0, 1, PL_REPLACE) == PL_COPIED);
    close_and_wait(it);
    CHECK(holds(it, 3, 1.5F) && holds(it, 2, 1) && holds(it, 1, 1));
    for (int r = 0; r < N_RANKS; r++) {
        CHECK(pl_reducer_n_late(it->reducers[r]) == 1);
        CHECK(pl_reducer_is_late(it->reducers[r], 2));
        CHECK(it->reducers[r]->slots[2].n_ready == (r == 0 ? 2 : 1));
    }
}

/* Parameter 2 is late on rank 0 with 64, and has a mean of 1. */
static void come_late(const pair *it)
{
    learn(it);
    begin_both(it);
    for (size_t i = N_PARAMS; i-- > 0;) {
        CHECK(mark_ready(it, 0, i, 1, PL_REPLACE) == PL_COPIED);
        CHECK(mark_ready(it, 1, i, 1, PL_REPLACE) == PL_COPIED);
    }
    CHECK(mark_ready(it, 0, 2, 64, PL_ADD) == PL_LATE);
    close_and_wait(it);
}

static void write_late(const pair *it, int rank, const float *value, pl_write_mode mode)
{
    float data[N_ELEMS];
    for (size_t i = 0; i < N_ELEMS; i++)
        data[i] = value != NULL ? *value : 0;
    CHECK_OK(pl_reducer_write_late(it->reducers[rank], 2, value != NULL ? data : NULL,
                                   mode));
}

TEST(what_is_late_is_added_to_the_mean_or_takes_its_place)
{
    static const float extra = 64;
    static const float total = 65;
    static const float one = 1;
    for (int is_added = 0; is_added < 2; is_added++) {
        pair it;
        if (!CHECK_OK(pair_create(&spec, &it)))
            return;
        come_late(&it);
        write_late(&it, 0, is_added ? &extra : &total, is_added ? PL_ADD : PL_REPLACE);
        write_late(&it, 1, is_added ? NULL : &one, is_added ? PL_ADD : PL_REPLACE);
        close_and_wait(&it);
        CHECK(holds(&it, 2, 33) && holds(&it, 3, 1) && holds(&it, 1, 1));
        CHECK(pl_reducer_n_late(it.reducers[0]) == 0);
        end_both(&it);
        /* The step was learned: twice is not late again. */
        begin_both(&it);
        for (size_t i = N_PARAMS; i-- > 0;)
            CHECK(mark_ready(&it, 0, i, 1, PL_REPLACE) == PL_COPIED);
        CHECK(mark_ready(&it, 0, 2, 64, PL_ADD) == PL_COPIED);
        pair_destroy(&it);
    }
}

PAIR_TEST(a_held_bucket_waits_for_the_close)
{
    learn(it);
    begin_both(it);
    pl_reducer_defer_bucket(it->reducers[0], 2);
    for (size_t i = N_PARAMS; i-- > 0;) {
        CHECK(mark_ready(it, 0, i, 1, PL_REPLACE) == PL_COPIED);
        CHECK(mark_ready(it, 1, i, 1, PL_REPLACE) == PL_COPIED);
    }
    for (size_t i = 0; i < N_PARAMS; i++) /* the next bucket waits too */
        CHECK(mark_ready(it, 0, i, 2, PL_ADD) == PL_COPIED);
    close_and_wait(it);
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK(holds(it, i, 2));
}

/* ---- settling ------------------------------------------------------------------- */

PAIR_TEST(a_parameter_without_gradient_contributes_what_it_is_settled_with)
{
    const float data[N_ELEMS] = {4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
    begin_both(it);
    pl_reducer *one = it->reducers[1];
    CHECK(mark_ready(it, 0, 0, 2, PL_REPLACE) == PL_COPIED);
    CHECK(mark_ready(it, 0, 1, 2, PL_REPLACE) == PL_COPIED);
    for (size_t i = 2; i < N_PARAMS; i++)
        CHECK_OK(
            pl_reducer_mark_unused(it->reducers[0], i, NULL, PL_REPLACE, PL_UNUSED));
    CHECK_OK(pl_reducer_mark_unused(one, 0, NULL, PL_REPLACE, PL_UNUSED));
    CHECK_OK(pl_reducer_mark_unused(one, 1, data, PL_REPLACE, PL_UNUSED));
    CHECK_OK(pl_reducer_mark_unused(one, 2, data, PL_REPLACE, PL_USED));
    CHECK_OK(pl_reducer_mark_unused(one, 3, data, PL_REPLACE, PL_UNUSED));
    close_and_wait(it);
    CHECK(holds(it, 0, 1) && holds(it, 1, 3) && holds(it, 2, 2));
    for (int r = 0; r < N_RANKS; r++) {
        CHECK(pl_reducer_is_used(it->reducers[r], 0));
        CHECK(pl_reducer_is_used(it->reducers[r], 1));
        CHECK(pl_reducer_is_used(it->reducers[r], 2));
        CHECK(!pl_reducer_is_used(it->reducers[r], 3));
    }
    end_both(it);
}

PAIR_TEST(nothing_delivered_counts_as_zeros_and_as_not_used)
{
    pl_ready_result result = PL_LATE;
    begin_both(it);
    CHECK(mark_ready(it, 0, 1, 2, PL_REPLACE) == PL_COPIED);
    for (int r = 0; r < N_RANKS; r++)
        CHECK_OK(
            pl_reducer_mark_ready(it->reducers[r], 0, NULL, PL_REPLACE, NULL, &result));
    CHECK(result == PL_COPIED);
    CHECK_OK(
        pl_reducer_mark_ready(it->reducers[1], 1, NULL, PL_REPLACE, NULL, &result));
    close_and_wait(it);
    CHECK(holds(it, 0, 0) && holds(it, 1, 1));
    CHECK(!pl_reducer_is_used(it->reducers[0], 0));
    CHECK(pl_reducer_is_used(it->reducers[1], 1));
}

PAIR_TEST(a_mean_is_sparse_where_no_rank_has_a_dense_gradient)
{
    begin_both(it);
    for (int r = 0; r < N_RANKS; r++) {
        pl_reducer *self = it->reducers[r];
        (void)mark_ready(it, r, 0, 2, PL_REPLACE);
        (void)mark_ready(it, r, 1, 2, PL_REPLACE);
        CHECK_OK(pl_reducer_mark_unused(self, 2, NULL, PL_REPLACE,
                                        r == 0 ? PL_USED : PL_UNUSED));
        CHECK_OK(pl_reducer_mark_unused(self, 3, NULL, PL_REPLACE, PL_UNUSED));
        for (size_t i = r == 0 ? 0 : 1; i < N_PARAMS; i++)
            pl_reducer_set_sparse(self, i, 1 + (unsigned)(i == 1 && r == 1));
    }
    close_and_wait(it);
    for (int r = 0; r < N_RANKS; r++) {
        static const unsigned n_dims[N_PARAMS] = {0, 2, 1, 0};
        for (size_t i = 0; i < N_PARAMS; i++)
            CHECK(pl_reducer_sparse_dims(it->reducers[r], i) == n_dims[i]);
        CHECK(pl_reducer_is_used(it->reducers[r], 0));
        CHECK(pl_reducer_is_used(it->reducers[r], 2));
        CHECK(!pl_reducer_is_used(it->reducers[r], 3));
    }
    CHECK(holds(it, 0, 2) && holds(it, 1, 2));
    end_both(it);
}

/* ---- calls out of place --------------------------------------------------------- */

static void check_idle_refusals(pl_reducer *idle)
{
    const float data[N_ELEMS] = {0};
    pl_ready_result result = PL_LATE;
    CHECK(!pl_reducer_is_active(idle));
    CHECK(pl_reducer_mark_ready(idle, 0, data, PL_REPLACE, NULL, &result) == PL_ESTATE);
    CHECK(pl_reducer_mark_unused(idle, 0, NULL, PL_REPLACE, PL_USED) == PL_ESTATE);
    CHECK(pl_reducer_close(idle) == PL_ESTATE);
    CHECK(pl_reducer_wait(idle, 0) == PL_ESTATE);
    CHECK(pl_reducer_write_late(idle, 0, NULL, PL_ADD) == PL_ESTATE);
    CHECK(pl_reducer_end(idle) == PL_ESTATE);
    CHECK(result == PL_LATE); /* written on success only */
}

PAIR_TEST(a_call_out_of_place_is_refused_and_changes_nothing)
{
    const float data[N_ELEMS] = {0};
    pl_ready_result result = PL_LATE;
    pl_reducer *one = it->reducers[0];
    check_idle_refusals(one);
    begin_both(it);
    CHECK(pl_reducer_is_active(one));
    CHECK(pl_reducer_begin(one) == PL_ESTATE);
    CHECK(pl_reducer_wait(one, 0) == PL_ESTATE);
    CHECK(pl_reducer_end(one) == PL_ESTATE);
    CHECK(pl_reducer_write_late(one, 0, NULL, PL_ADD) == PL_ESTATE);
    CHECK(mark_ready(it, 1, 0, 1, PL_REPLACE) == PL_COPIED);
    CHECK(pl_reducer_shadow_step(it->reducers[1], PL_JOINING) == PL_ESTATE);
    CHECK_OK(pl_reducer_close(one));
    CHECK(pl_reducer_close(one) == PL_ESTATE);
    CHECK(pl_reducer_mark_ready(one, 0, data, PL_REPLACE, NULL, &result) == PL_ESTATE);
    CHECK(pl_reducer_mark_unused(one, 0, NULL, PL_REPLACE, PL_USED) == PL_ESTATE);
    CHECK(pl_reducer_wait(one, 0) == PL_EAGAIN);
    CHECK(pl_reducer_end(one) == PL_ESTATE);
    CHECK_OK(pl_reducer_close(it->reducers[1]));
    CHECK_OK(pl_comm_progress(it->comms[1]));
    CHECK_OK(pl_reducer_wait(one, RANKS_SLICE_NS));
    CHECK(pl_reducer_write_late(one, 0, NULL, PL_ADD) == PL_ESTATE); /* not late */
    CHECK_OK(pl_reducer_wait(it->reducers[1], RANKS_SLICE_NS));
    end_both(it);
    check_idle_refusals(one);
}

PAIR_TEST(an_amendment_is_waited_for_after_its_close_and_not_before)
{
    static const float extra = 64;
    come_late(it);
    for (int r = 0; r < N_RANKS; r++)
        write_late(it, r, &extra, PL_ADD);
    CHECK(pl_reducer_wait(it->reducers[0], 0) == PL_ESTATE);
    CHECK(pl_reducer_end(it->reducers[0]) == PL_ESTATE);
    close_and_wait(it);
    CHECK(holds(it, 2, 65));
    end_both(it);
}

PAIR_TEST(an_arena_too_small_or_no_parameter_makes_no_reducer)
{
    static const pl_reducer_spec nothing = {.params = params, .n_params = 0};
    pl_reducer *reducer = NULL;
    pl_comm *small = NULL;
    if (!CHECK_OK(local_create(1, 4096, RANKS_DEADLINE_NS, &small)))
        return;
    CHECK_FAILS(pl_reducer_create(&spec, small, it->backend, &reducer), PL_EINVAL,
                "too small for 4 parameters");
    CHECK(pl_reducer_create(&nothing, it->comms[0], it->backend, &reducer) ==
          PL_EINVAL);
    CHECK(reducer == NULL);
    pl_reducer_destroy(NULL);
    pli_backend_destroy(NULL);
    pl_comm_destroy(small);
}

/* ---- failure -------------------------------------------------------------------- */

PAIR_TEST(a_rank_learns_before_its_next_step_that_another_has_failed)
{
    static const uint32_t order[N_PARAMS] = {3, 2, 1, 0};
    step_in_order(it, order);
    CHECK_OK(pl_reducer_begin(it->reducers[0]));
    pl_reducer_fail(it->reducers[0], "before the other rank had begun");
    CHECK_FAILS(pl_reducer_begin(it->reducers[1]), PL_EPEER,
                "before the other rank had begun");
    CHECK_FAILS(pl_reducer_begin(it->reducers[0]), PL_EPEER,
                "no forward has met the other ranks since");
}
