/* test_reducer_check.c - ranks compare the means that they got in the step before. */
#include <stdlib.h>

#include "reducer_pair.h"

enum { N_PARAMS = 40, N_ELEMS = 1 << 13, N_SAMPLES = 16 };

static pl_param params[N_PARAMS];
static float gradient[N_ELEMS];

static pl_reducer_spec spec_of(size_t n_params)
{
    for (size_t i = 0; i < N_PARAMS; i++)
        params[i] = (pl_param){.n_elems = N_ELEMS, .dtype = PL_F32};
    return (pl_reducer_spec){.params = params,
                             .n_params = n_params,
                             .caps = {.bucket_bytes = 1 << 17, .last_bytes = 1 << 15}};
}

/* One step of both ranks.  Before rank 1 reads its mean of `damaged`, a bit of it
 * changes; no mean changes if it is SIZE_MAX.  Returns what rank 1 gets. */
static pl_status take_step(const pair *it, size_t n_params, size_t damaged)
{
    pl_status found[2];
    begin_both(it);
    for (int r = 0; r < 2; r++) {
        for (size_t i = 0; i < n_params; i++) {
            pl_ready_result result;
            CHECK_OK(pl_reducer_mark_ready(it->reducers[r], i, gradient, PL_REPLACE,
                                           NULL, &result));
        }
        CHECK_OK(pl_reducer_close(it->reducers[r]));
    }
    CHECK_OK(pl_comm_progress(it->comms[1]));
    CHECK_OK(pl_comm_progress(it->comms[0]));
    CHECK_OK(pl_comm_progress(it->comms[1]));
    if (damaged != SIZE_MAX)
        pair_slot(it, 1, damaged)[params[damaged].n_elems - 1] = 1e-30F;
    for (int r = 0; r < 2; r++) {
        found[r] = pl_reducer_wait(it->reducers[r], RANKS_SLICE_NS);
        if (found[r] != PL_OK)
            CHECK_SAYS("rank 1 (host 0) and rank 0 (host 0) got different means");
    }
    CHECK(found[0] == found[1]);
    if (found[0] == PL_OK)
        end_both(it);
    return found[1];
}

static void expect_failed(const pair *it)
{
    for (int r = 0; r < 2; r++) {
        pl_reducer_fail(it->reducers[r], "the means differ");
        CHECK(pl_reducer_check_weights(it->reducers[r]) == PL_EMISMATCH);
        CHECK_SAYS("the ranks' weights differ since step");
    }
}

static void see_damage_anywhere(pair *it)
{
    const size_t damaged = (size_t)rand() % N_PARAMS;
    for (int step = 0; step < 3; step++)
        CHECK_OK(take_step(it, N_PARAMS, SIZE_MAX));
    CHECK_OK(take_step(it, N_PARAMS, damaged));
    CHECK(take_step(it, N_PARAMS, SIZE_MAX) == PL_EMISMATCH);
    CHECK_SAYS("at the end of step 4, in buckets 1 to 11 of 11");
    expect_failed(it);
}

TEST(a_changed_mean_is_an_error_on_every_rank_in_the_next_step)
{
    const pl_reducer_spec spec = spec_of(N_PARAMS);
    CHECK(setenv("PACELINE_CHECK", "all", 1) == 0);
    for (int i = 0; i < 10; i++)
        pair_run(&spec, see_damage_anywhere);
}

static void see_nothing(pair *it)
{
    for (int step = 0; step < 3 * N_SAMPLES; step++)
        CHECK_OK(take_step(it, N_PARAMS, (size_t)step % N_PARAMS));
}

TEST(ranks_of_one_host_compare_only_when_asked)
{
    const pl_reducer_spec spec = spec_of(N_PARAMS);
    CHECK(setenv("PACELINE_CHECK", "rotate", 1) == 0);
    pair_run(&spec, see_nothing);
    CHECK(setenv("PACELINE_CHECK", "off", 1) == 0);
    pair_run(&spec, see_nothing);
}

static void rotate_over_all(pair *it)
{
    const size_t damaged = (size_t)rand() % N_PARAMS;
    int n_steps = 0;
    /* As in a world of several hosts. */
    for (int r = 0; r < 2; r++)
        it->comms[r]->host = NULL;
    for (int step = 0; step < rand() % N_SAMPLES; step++)
        CHECK_OK(take_step(it, N_PARAMS, SIZE_MAX));
    while (n_steps <= N_SAMPLES && take_step(it, N_PARAMS, damaged) == PL_OK)
        n_steps++;
    CHECK(n_steps > 0 && n_steps <= N_SAMPLES);
}

TEST(the_window_comes_to_each_mean)
{
    const pl_reducer_spec spec = spec_of(N_PARAMS);
    CHECK(setenv("PACELINE_CHECK", "rotate", 1) == 0);
    for (int i = 0; i < 20; i++)
        pair_run(&spec, rotate_over_all);
}

static void see_small_damage(pair *it)
{
    for (int r = 0; r < 2; r++)
        it->comms[r]->host = NULL;
    CHECK_OK(take_step(it, 1, 0));
    CHECK(take_step(it, 1, SIZE_MAX) == PL_EMISMATCH);
}

TEST(small_models_are_checked_in_each_step)
{
    pl_reducer_spec spec = spec_of(1);
    params[0].n_elems = 1 << 12;
    pair_run(&spec, see_small_damage);
}

static void go_on_after_failure(pair *it)
{
    for (int step = 0; step < 3; step++)
        CHECK_OK(take_step(it, N_PARAMS, SIZE_MAX));
    pl_reducer_fail(it->reducers[0], "a failure of this test's");
    CHECK(pl_reducer_notice_failure(it->reducers[1]) == PL_EPEER);
    const pl_reducer_spec spec = spec_of(N_PARAMS);
    if (!pair_renew(&spec, it))
        return;
    for (int step = 0; step < 3; step++)
        CHECK_OK(take_step(it, N_PARAMS, SIZE_MAX));
}

TEST(ranks_compare_anew_after_a_failed_step)
{
    const pl_reducer_spec spec = spec_of(N_PARAMS);
    CHECK(setenv("PACELINE_CHECK", "all", 1) == 0);
    pair_run(&spec, go_on_after_failure);
}

TEST(another_word_is_refused)
{
    const pl_reducer_spec spec = spec_of(N_PARAMS);
    pair it;
    CHECK(setenv("PACELINE_CHECK", "yes", 1) == 0);
    CHECK(pair_create(&spec, &it) == PL_EINVAL);
    CHECK_SAYS("PACELINE_CHECK is 'yes': give off, rotate or all");
}
