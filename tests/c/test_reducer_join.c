/* test_reducer_join.c - ranks without gradients take shadow steps, and the others'
 * means are exact; every rank sees the roles, and whose `extra` it has. */
#include "steps.h"

enum { JOIN_MOST_STEPS = 7 };

typedef struct lesson {
    model it;
    int divides_by_active;
} lesson;

/* Rank r has 1 to JOIN_MOST_STEPS - 1 batches. */
static lesson lesson_of(uint64_t seed, int world_size, size_t n_params)
{
    lesson self = {.it = model_of(seed, world_size, n_params)};
    draw random = draw_of(seed + 77);
    for (int r = 0; r < world_size; r++)
        self.it.n_batches[r] = 1 + draw_below(&random, JOIN_MOST_STEPS - 1);
    return self;
}

static pl_participation expected_participation(const model *it, uint64_t step)
{
    pl_participation participation = {.first_active = -1, .last_joining = -1};
    for (int r = it->world_size; r-- > 0;) {
        if (step_has_batch(it, step, r)) {
            participation.n_active++;
            participation.first_active = r;
        } else if (step == it->n_batches[r] + 1 && participation.last_joining < 0) {
            participation.last_joining = r;
        }
    }
    return participation;
}

static int participation_equal(pl_participation a, pl_participation b)
{
    return a.n_active == b.n_active && a.first_active == b.first_active &&
           a.last_joining == b.last_joining;
}

/* The root sends (step, rank); the values count if it is active. */
static void check_extra(trainer *self, uint64_t step)
{
    const model *it = self->model;
    const pl_participation before =
        step > 1 ? expected_participation(it, step - 1) : (pl_participation){0};
    const int root = before.first_active >= 0 ? before.first_active : 0;
    uint64_t extra = 0;
    CHECK(self->reducer->root == root);
    CHECK((pl_reducer_root_is_active(self->reducer) != 0) ==
          (step_has_batch(it, step, root) != 0));
    memcpy(&extra, pl_reducer_extra(self->reducer), sizeof extra);
    if (pl_reducer_root_is_active(self->reducer))
        CHECK(extra == step * 100 + (uint64_t)root);
}

static void check_means(trainer *self, uint64_t step, int divisor)
{
    const model *it = self->model;
    for (size_t i = 0; i < it->n_params; i++) {
        CHECK((pl_reducer_is_used(self->reducer, i) != 0) ==
              (step_is_used(it, step, i) != 0));
        check_mean(it, step, self->rank, i, trainer_slot(self, i), divisor);
    }
}

static int shadow_step(trainer *self, uint64_t step)
{
    const int is_first = step == self->model->n_batches[self->rank] + 1;
    if (!CHECK_OK(pl_reducer_shadow_step(self->reducer,
                                         is_first ? PL_JOINING : PL_SHADOWING)) ||
        !CHECK_OK(pl_reducer_close(self->reducer)) ||
        !CHECK_OK(reducer_wait_through(self->reducer)))
        return 0;
    memset(self->taken, 0, sizeof self->taken);
    return pl_reducer_n_late(self->reducer) == 0 || CHECK_OK(trainer_amend(self, step));
}

static int train_once(trainer *self, uint64_t step)
{
    if (!CHECK_OK(trainer_backward(self, step, self->model->n_params)))
        return 0;
    const uint64_t extra = step * 100 + (uint64_t)self->rank;
    const int is_root = self->reducer->root == self->rank;
    if (is_root)
        memcpy(pl_reducer_extra(self->reducer), &extra, sizeof extra);
    return CHECK_OK(trainer_finish_with_extra(self, step));
}

static int step_unevenly(trainer *self, const lesson *what, uint64_t step)
{
    const model *it = self->model;
    const pl_participation participation = expected_participation(it, step);
    const int is_active = step_has_batch(it, step, self->rank);
    if (!CHECK_OK(pl_reducer_begin(self->reducer)) ||
        !(is_active ? train_once(self, step) : shadow_step(self, step)))
        return 0;
    CHECK(participation_equal(self->reducer->participation, participation));
    check_extra(self, step);
    if (what->divides_by_active)
        CHECK_OK(pl_reducer_rescale(self->reducer));
    if (participation.n_active > 0)
        check_means(self, step,
                    what->divides_by_active ? participation.n_active : it->world_size);
    return CHECK_OK(pl_reducer_end(self->reducer));
}

static void train_unevenly(rank_job *job)
{
    const lesson *what = job->context;
    trainer self;
    if (!trainer_create(&what->it, job->comm, &job->random, &self))
        return;
    for (uint64_t step = 1; step <= JOIN_MOST_STEPS; step++)
        if (!step_unevenly(&self, what, step))
            break;
    CHECK(self.reducer->participation.n_active == 0);
    CHECK(self.reducer->generation == 1); /* an order was learned */
    trainer_destroy(&self);
}

TEST(ranks_that_stand_in_count_as_zeros)
{
    for (uint64_t seed = 1; seed <= 24; seed++) {
        lesson what = lesson_of(seed, 1 + (int)(seed % 4), 1 + seed);
        what.it.rest_ns = seed % 2 == 0 ? 20000 : 0;
        run_model(&what.it, train_unevenly, &what);
    }
}

TEST(they_amend_with_nothing_what_comes_late_to_others)
{
    for (uint64_t seed = 100; seed < 116; seed++) {
        lesson what = lesson_of(seed, 2 + (int)(seed % 3), 30);
        what.it.percent_twice = 30;
        what.it.percent_unused = 20;
        run_model(&what.it, train_unevenly, &what);
    }
}

TEST(means_over_the_active_ranks_are_exact_where_they_can_be)
{
    for (uint64_t seed = 200; seed < 224; seed++) {
        lesson what = lesson_of(seed, 2 + (int)(seed % 3), 30);
        what.divides_by_active = 1;
        what.it.unit = 12;
        what.it.percent_unused = 20;
        run_model(&what.it, train_unevenly, &what);
    }
}

static void stand_in_with_gradients(rank_job *job)
{
    trainer self;
    if (!trainer_create(job->context, job->comm, &job->random, &self))
        return;
    CHECK_OK(pl_reducer_begin(self.reducer));
    CHECK_OK(trainer_backward(&self, 1, 1));
    CHECK(pl_reducer_shadow_step(self.reducer, PL_JOINING) == PL_ESTATE);
    trainer_destroy(&self);
}

TEST(a_rank_with_gradients_does_not_stand_in)
{
    model it = model_of(5, 1, 2);
    run_model(&it, stand_in_with_gradients, &it);
}

/* ---- the arithmetic ------------------------------------------------------------- */

TEST(scaling_rounds_once_to_nearest_even)
{
    const pl_dtype dtypes[] = {PL_BF16, PL_F16};
    pl_backend *backend = NULL;
    if (!CHECK_OK(pli_cpu_backend_create(&backend)))
        return;
    for (size_t d = 0; d < 2; d++) { /* every 16-bit float, doubled and halved */
        uint16_t before[1 << 16], data[1 << 16];
        const pl_move move = {.to = data, .dtype = dtypes[d], .n_elems = 1 << 16};
        const unsigned infinity = dtypes[d] == PL_BF16 ? 0x7f80 : 0x7c00;
        const unsigned one = dtypes[d] == PL_BF16 ? 0x80 : 0x400;
        size_t n_wrong = 0;
        for (size_t i = 0; i < 1 << 16; i++)
            before[i] = data[i] = (uint16_t)i;
        CHECK_OK(backend->ops->scale(backend, &move, 1, 4, 2, NULL));
        for (size_t i = 0; i < 1 << 16; i++) {
            const unsigned size = before[i] & 0x7fff;
            unsigned doubled = size < one ? size * 2 : size + one;
            if (size >= infinity)
                doubled = size;
            else if (doubled > infinity)
                doubled = infinity;
            n_wrong += data[i] != ((before[i] & 0x8000) | doubled);
        }
        CHECK(n_wrong == 0);
        memcpy(data, before, sizeof data);
        CHECK_OK(backend->ops->scale(backend, &move, 1, 2, 4, NULL));
        n_wrong = 0;
        for (size_t i = 0; i < 1 << 16; i++) {
            const unsigned size = before[i] & 0x7fff;
            unsigned halved = size - one;
            if (size >= infinity)
                halved = size;
            else if (size < 2 * one) /* half a step rounds to even */
                halved = size / 2 + (size % 4 == 3);
            n_wrong += data[i] != ((before[i] & 0x8000) | halved);
        }
        CHECK(n_wrong == 0);
    }
    float third[3] = {3.0F, 1.0F, -5.0F};
    const pl_move move = {.to = third, .dtype = PL_F32, .n_elems = 3};
    CHECK_OK(backend->ops->scale(backend, &move, 1, 4, 3, NULL));
    CHECK(third[0] == 4.0F && third[1] == 4.0F / 3.0F && third[2] == -20.0F / 3.0F);
    pli_backend_destroy(backend);
}
