/* test_step_hook.c - a communication hook of the user averages the buckets and the
 * rows.
 *
 * The hook of these tests writes a letter for each call, and doubles this rank's
 * gradients in place of a mean. */
#include "step_ranks.h"

enum { SMALL, LARGE, ROWS, N_PARAMS, N_RANKS = 2, MOST_LETTERS = 64 };

static const array_param params[N_PARAMS] = {
    [SMALL] = {2, 2, 0}, [LARGE] = {4, 8, 0}, [ROWS] = {4, 2, 1}};
static const pl_plan_caps each_alone = {.bucket_bytes = 1, .last_bytes = 1};
static const pl_plan_caps together = {.bucket_bytes = 4096, .last_bytes = 4096};
static const array_model model = {
    .params = params, .n_params = N_PARAMS, .view_bytes = 64, .caps = together};

/* What the hook of a rank has done, and where it fails. */
typedef struct hook_log {
    char letters[MOST_LETTERS]; /* p post, f finish, s settle, r rows, a abandon */
    size_t n;
    char fails_at; /* a letter; 0: none */
    int is_active, binds_results;
} hook_log;

static pl_status write_letter(void *context, char letter)
{
    pl_status st = PL_OK;
    hook_log *log = arrays_of(context)->context;
    CHECK(log->n + 1 < MOST_LETTERS);
    log->letters[log->n++] = letter;
    if (letter == log->fails_at)
        PL_FAIL(PL_ESTATE, "the hook refused %c", letter);
done:
    return st;
}

static pl_status post(void *context, size_t bucket)
{
    const rank_arrays *self = context;
    const pl_plan *plan = pl_step_look(self->step).plan;
    size_t n_elems = 0;
    for (size_t m = 0; m < plan->buckets[bucket].n_params; m++) {
        const array_param *param = &params[plan->buckets[bucket].params[m]];
        n_elems += param->is_sparse ? 0 : (size_t)(param->n_rows * param->n_cols);
    }
    CHECK(pl_step_bucket_elems(self->step, bucket) == n_elems);
    return write_letter(context, 'p');
}

static pl_status double_buckets(rank_arrays *self)
{
    pl_status st = PL_OK;
    float flat[2 * ARRAYS_MOST_ELEMS];
    const size_t n_buckets = pl_step_look(self->step).plan->n_buckets;
    for (size_t b = 0; b < n_buckets; b++) {
        const size_t n = pl_step_bucket_elems(self->step, b);
        flat[n] = 77;
        PL_TRY(pl_step_copy_bucket(self->step, b, flat, PL_FROM_SLOTS));
        CHECK(flat[n] == 77);
        for (size_t k = 0; k < n; k++)
            flat[k] *= 2;
        PL_TRY(pl_step_copy_bucket(self->step, b, flat, PL_TO_SLOTS));
    }
done:
    return st;
}

static pl_status finish(void *context)
{
    const pl_status st = write_letter(context, 'f');
    return st == PL_OK ? double_buckets(context) : st;
}

static void settle(void *context)
{
    (void)!write_letter(context, 's');
}

static pl_status finish_sparse(void *context, const size_t *sparse, size_t n,
                               int is_active, int binds_results)
{
    float values[ARRAYS_MOST_ELEMS];
    rank_arrays *self = context;
    hook_log *log = self->context;
    CHECK(n == 1 && sparse[0] == ROWS);
    log->is_active = is_active;
    log->binds_results = binds_results;
    if (is_active) {
        array_values(self->grads[ROWS], values);
        for (size_t k = 0; k < self->grads[ROWS]->layout.n_elems; k++)
            values[k] *= 2;
        array_fill(self->grads[ROWS], values);
    }
    return write_letter(context, 'r');
}

static void abandon(void *context)
{
    (void)!write_letter(context, 'a');
}

static const pl_step_hook hook = {.post = post,
                                  .finish = finish,
                                  .settle = settle,
                                  .finish_sparse = finish_sparse,
                                  .abandon = abandon};

/* ---- steps ---------------------------------------------------------------------- */

static pl_grad *gradient(rank_arrays *self, size_t i)
{
    float values[ARRAYS_MOST_ELEMS] = {0};
    const pli_layout layout = layout_of(params[i].n_rows, params[i].n_cols);
    for (size_t k = 0; k < layout.n_elems; k++)
        if (i != ROWS || (int)k / params[i].n_cols == self->rank)
            values[k] = (float)(k + i + 1);
    return i == ROWS ? array_sparse_of(self, &layout, values)
                     : array_dense_of(self, &layout, values);
}

static pl_status take(rank_arrays *self, size_t i)
{
    return arrays_arrive(self, i, gradient(self, i), PL_ARRIVES_ALONE);
}

static pl_status take_step(rank_arrays *self)
{
    pl_status st = PL_OK;
    arrays_zero(self);
    for (size_t i = 0; i < N_PARAMS; i++)
        PL_TRY(take(self, i));
    PL_TRY(arrays_end_backward(self));
done:
    return st;
}

/* Whether `.grad` is twice this rank's gradient. */
static int is_doubled(rank_arrays *self, size_t i)
{
    float values[ARRAYS_MOST_ELEMS];
    pl_grad *once = gradient(self, i);
    array_values(once, values);
    array_drop(once);
    for (size_t k = 0; k < self->grads[i]->layout.n_elems; k++)
        values[k] *= 2;
    return array_holds(self->grads[i], values);
}

static void expect_letters(rank_arrays *self, const char *letters)
{
    hook_log *log = self->context;
    if (!CHECK(strcmp(log->letters, letters) == 0))
        CHECK_MORE("'%s', not '%s'", log->letters, letters);
    memset(log->letters, 0, sizeof log->letters);
    log->n = 0;
}

/* A rank with the hook, and how it runs. */
typedef void (*hooked_fn)(rank_arrays *self, hook_log *log);

typedef struct hooked {
    hooked_fn run;
} hooked;

static void run_hooked(rank_job *job)
{
    const hooked *what = job->context;
    rank_arrays self;
    hook_log log = {.n = 0};
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        self.context = &log;
        CHECK_OK(pl_step_set_hook(self.step, &hook, &each_alone));
        CHECK(pl_step_look(self.step).plan->n_buckets == N_PARAMS);
        what->run(&self, &log);
        CHECK(arrays_n_in_step(&self) == 0);
        CHECK(self.n_alive == arrays_n_known(&self));
    }
    arrays_destroy(&self);
}

static void run_ranks(hooked_fn run)
{
    hooked what = {.run = run};
    arrays_run(&model, N_RANKS, run_hooked, &what, 1);
}

/* A test of two ranks, each with the hook. */
#define HOOKED_TEST(name)                                                              \
    static void name##_by(rank_arrays *self, hook_log *log);                           \
    TEST(name)                                                                         \
    {                                                                                  \
        run_ranks(name##_by);                                                          \
    }                                                                                  \
    static void name##_by(rank_arrays *self, hook_log *log)

HOOKED_TEST(the_hook_gets_each_bucket_once_and_its_results_become_the_gradients)
{
    for (int n = 0; n < 4; n++) {
        CHECK_OK(take_step(self));
        expect_letters(self, "pppfr");
        CHECK(log->is_active && log->binds_results);
        for (size_t i = 0; i < N_PARAMS; i++)
            CHECK(is_doubled(self, i));
        CHECK(self->grads[LARGE]->window != NULL);
    }
}

HOOKED_TEST(buckets_are_posted_as_they_fill)
{
    (void)log;
    CHECK_OK(take_step(self));
    expect_letters(self, "pppfr");
    arrays_zero(self);
    for (size_t i = 0; i < N_PARAMS; i++) {
        static const char *const letters[] = {"p", "p", "p"};
        CHECK_OK(take(self, i));
        expect_letters(self, letters[i]);
    }
    CHECK_OK(arrays_end_backward(self));
    expect_letters(self, "fr");
}

HOOKED_TEST(a_hook_is_not_set_during_a_step)
{
    (void)log;
    CHECK_OK(take(self, SMALL));
    CHECK_FAILS(pl_step_set_hook(self->step, &hook, &together), PL_ESTATE,
                "during a step");
    CHECK_OK(arrays_end_backward(self));
    CHECK_OK(pl_step_set_hook(self->step, &hook, &together));
    CHECK(pl_step_look(self->step).plan->n_buckets == 1);
    expect_letters(self, "pppf"); /* no rank has rows */
    CHECK_OK(take_step(self));
    expect_letters(self, "pfr");
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK(is_doubled(self, i));
}

HOOKED_TEST(the_hook_has_caps_of_its_own_and_keeps_what_was_learned)
{
    size_t each[2] = {16, 4096};
    const pl_plan_caps caps = {.each = each, .n_each = 2};
    CHECK_OK(pl_step_set_hook(self->step, &hook, &caps));
    each[0] = each[1] = 1; /* they were copied */
    const pl_plan *plan = pl_step_look(self->step).plan;
    CHECK(plan->n_buckets == 2 && plan->members[0] == ROWS);
    for (int n = 0; n < 2; n++)
        CHECK_OK(take_step(self));
    expect_letters(self, "ppfrppfr");
    plan = pl_step_look(self->step).plan;
    CHECK(plan->n_buckets == 2 && plan->buckets[0].n_params == 1);
    CHECK(plan->members[0] == SMALL);
    CHECK_OK(pl_step_set_hook(self->step, &hook, &together));
    plan = pl_step_look(self->step).plan;
    CHECK(plan->n_buckets == 1 && plan->members[0] == SMALL);
    CHECK(log->n == 0);
}

HOOKED_TEST(a_late_gradient_on_any_rank_is_refused_on_all)
{
    (void)log;
    CHECK_OK(take_step(self));
    expect_letters(self, "pppfr");
    arrays_zero(self);
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK_OK(take(self, i));
    if (self->rank == 0)
        CHECK_OK(take(self, SMALL));
    const pl_status st = arrays_end_backward(self);
    CHECK(st == PL_ESTATE || st == PL_EPEER); /* a peer may be the first to say so */
    if (st == PL_ESTATE)
        CHECK_SAYS("ready only once", "index 0", "some rank");
    arrays_fail(self);
    expect_letters(self, "pppa");
}

HOOKED_TEST(ranks_in_different_steps_settle_the_hook_and_go_on)
{
    (void)log;
    for (int n = 0; n <= self->rank; n++) {
        CHECK_OK(pl_step_forward_begins(self->step));
        (void)pl_step_forward_ends(self->step, PL_OUTPUTS_UNWATCHED, PL_TRAINS);
    }
    CHECK_FAILS(take_step(self), PL_EMISMATCH, "not in the same step");
    expect_letters(self, "ppps");
    CHECK(!pl_step_look(self->step).has_failed);
    CHECK_OK(take_step(self));
    expect_letters(self, "pppfr");
}

HOOKED_TEST(a_rank_without_batches_takes_the_results_of_the_hook)
{
    CHECK_OK(take_step(self));
    expect_letters(self, "pppfr");
    pl_step_set_join(self->step, PL_BY_N_ACTIVE, PL_JOIN_GOES_ON);
    if (self->rank == 0) {
        CHECK_OK(take_step(self));
        CHECK(log->is_active && log->binds_results);
        for (size_t i = 0; i < N_PARAMS; i++) /* not scaled */
            CHECK(is_doubled(self, i));
    } else {
        CHECK_OK(pl_step_shadow(self->step, PL_JOINING, PL_LEAVES_GRADS));
        CHECK(!log->is_active && !log->binds_results);
        for (size_t i = 0; i < N_PARAMS; i++)
            CHECK(is_doubled(self, i)); /* of the step before */
        expect_letters(self, "pppfr");
        CHECK_OK(pl_step_shadow(self->step, PL_SHADOWING, PL_BINDS_RESULTS));
        CHECK(!log->is_active && log->binds_results);
        for (size_t k = 0; k < self->grads[LARGE]->layout.n_elems; k++)
            CHECK(array_get(self->grads[LARGE], k) == 0); /* twice a shadow's zeros */
    }
    if (self->rank == 0) {
        expect_letters(self, "pppfr");
        CHECK_OK(take_step(self));
    }
    expect_letters(self, "pppfr");
}

/* ---- failures ------------------------------------------------------------------- */

/* Each call of the hook fails in turn, on rank 0; its peer learns of it. */
static void fail_at(rank_arrays *self, hook_log *log, char letter, const char *letters)
{
    CHECK_OK(take_step(self));
    expect_letters(self, "pppfr");
    log->fails_at = (char)(self->rank == 0 ? letter : 0);
    const pl_status st = take_step(self);
    CHECK(st == (self->rank == 0 ? PL_ESTATE : PL_EPEER));
    CHECK(error_has("the hook refused"));
    arrays_fail(self);
    CHECK(pl_step_look(self->step).has_failed);
    if (self->rank == 0)
        expect_letters(self, letters);
    else
        CHECK(log->letters[log->n - 1] == 'a');
}

HOOKED_TEST(a_bucket_that_the_hook_refuses_fails_the_step)
{
    fail_at(self, log, 'p', "pa");
}

HOOKED_TEST(a_hook_that_cannot_finish_fails_the_step)
{
    fail_at(self, log, 'f', "pppfa");
}

HOOKED_TEST(rows_that_the_hook_refuses_fail_the_step)
{
    fail_at(self, log, 'r', "pppfra");
}
