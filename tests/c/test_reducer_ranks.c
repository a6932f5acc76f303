/* test_reducer_ranks.c - reducers on ranks that are threads: exact means for any
 * ranges, in any order, however late, and whichever rank fails. */
#include <limits.h>

#include "steps.h"

/* ---- steps without failures ----------------------------------------------------- */

TEST(means_are_exact_whatever_is_left_out_held_late_or_without_elements)
{
    static const struct {
        uint64_t seed;
        size_t n_params;
        unsigned percent_unused, percent_twice, percent_held;
        size_t hollow; /* one in so many parameters has no elements; 0: none */
        int least_late, most_late;
    } rows[] = {
        {1, 8, 0, 0, 0, 0, 0, 0}, /* each rank has all, once */
        {10, 36, 0, 0, 0, 0, 0, 0},
        {20, 25, 50, 0, 0, 0, 0, 0}, /* zeros, if some ranks or all leave them out */
        {40, 30, 0, 30, 0, 0, 11, INT_MAX}, /* added, if they come late too */
        {60, 30, 0, 40, 100, 0, 0, 0},      /* held buckets take all gradients */
        {80, 30, 10, 40, 0, 2, 0, INT_MAX}, /* never late without elements */
    };
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
        atomic_store(&n_late_verdicts, 0);
        for (int world_size = 1; world_size <= 4; world_size++) {
            model it = model_of(rows[k].seed + (uint64_t)world_size, world_size,
                                rows[k].n_params);
            it.percent_unused = rows[k].percent_unused;
            it.percent_twice = rows[k].percent_twice;
            it.percent_held = rows[k].percent_held;
            for (size_t i = 0; rows[k].hollow > 0 && i < it.n_params;
                 i += rows[k].hollow)
                it.params[i].n_elems = 0;
            run_model(&it, train_model, &it);
        }
        if (!CHECK(atomic_load(&n_late_verdicts) >= rows[k].least_late &&
                   atomic_load(&n_late_verdicts) <= rows[k].most_late))
            CHECK_MORE("row %zu: %d late", k, atomic_load(&n_late_verdicts));
    }
}

TEST(everything_at_once_comes_out_exact_with_ranks_that_dawdle)
{
    for (uint64_t seed = 100; seed < 124; seed++) {
        model it = model_of(seed, 1 + (int)(seed % 4), 1 + seed % STEPS_MAX_PARAMS);
        it.percent_unused = 20;
        it.percent_twice = 25;
        it.percent_held = 5;
        it.rest_ns = seed % 2 == 0 ? 60000 : 0;
        run_model(&it, train_model, &it);
    }
}

/* ---- steps that fail ------------------------------------------------------------ */

enum { N_FAILING_STEPS = 40 };

/* This rank fails in the middle of its backward, or learns that another did. */
static void run_into_accident(trainer *self, uint64_t step, const accident *what)
{
    pl_status st = pl_reducer_begin(self->reducer);
    if (self->rank == what->culprit) {
        CHECK_OK(st);
        CHECK_OK(trainer_backward(self, step, what->after_params));
        CHECK(pl_reducer_is_active(self->reducer));
        pl_reducer_fail(self->reducer, what->words);
    } else {
        if (st == PL_OK)
            st = trainer_backward(self, step, self->model->n_params);
        if (st == PL_OK)
            st = trainer_finish(self, step);
        check_accident(what, self->rank, st);
        pl_reducer_fail(self->reducer, NULL);
    }
    CHECK(!pl_reducer_is_active(self->reducer));
}

static succession worlds;

/* Leaves a failed world for the next. */
static int renew(trainer *self)
{
    trainer failed = *self;
    pl_comm *next = succession_meet(&worlds, self->model, self->rank);
    if (next == NULL || !trainer_create(self->model, next, failed.random, self))
        return 0;
    CHECK_OK(pl_reducer_check_weights(failed.reducer));
    pl_reducer_follow(self->reducer, failed.reducer);
    trainer_destroy(&failed);
    pl_comm_destroy(failed.comm);
    return 1;
}

static void train_with_accidents(rank_job *job)
{
    const model *it = job->context;
    uint64_t n_taken = 0;
    trainer self;
    if (!trainer_create(it, job->comm, &job->random, &self))
        return;
    for (uint64_t step = 1; step <= N_FAILING_STEPS; step++) {
        const accident what = accident_of(it, step);
        draw_rest(&job->random, 200000);
        if (what.culprit >= 0)
            run_into_accident(&self, step, &what);
        if (what.culprit >= 0 ? !renew(&self) : !trainer_step(&self, step))
            break;
        n_taken += what.culprit < 0;
        CHECK(self.reducer->n_taken == n_taken);
    }
    trainer_destroy(&self);
    pl_comm_destroy(self.comm);
}

static int make_world(const model *it, size_t n_bytes, pl_comm **out)
{
    return CHECK_OK(local_create(it->world_size, n_bytes, RANKS_DEADLINE_NS, out));
}

TEST(after_a_step_that_failed_anywhere_the_next_world_is_exact)
{
    for (uint64_t seed = 200; seed < 212; seed++) {
        model it = model_of(seed, 2 + (int)(seed % 3), 1 + seed % STEPS_MAX_PARAMS);
        it.percent_unused = 10;
        it.percent_twice = 15;
        it.rest_ns = seed % 2 == 0 ? 20000 : 0;
        const pl_reducer_spec spec = spec_of(&it);
        worlds.make = make_world;
        worlds.n_bytes = pl_reducer_arena_bytes(&spec);
        succession_run(&worlds, &it, train_with_accidents, &it);
    }
}
