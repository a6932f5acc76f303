/* test_reducer_device.c - reducers on fake devices: exact means for any gradients, in
 * any order, on any stream, and at any speed of the device.
 *
 *     test_reducer_device [seeds [first seed]]
 */
#include "gpu_steps.h"
#include "hosts.h"
#include "seeds.h"

enum { N_STEPS = 7, SEEDS = IS_SANITIZED ? 10 : 24 };

/* ---- worlds --------------------------------------------------------------------- */

static fake_options options_of(uint64_t seed)
{
    static const fake_schedule schedules[] = {FAKE_LATE, FAKE_RANDOM, FAKE_EARLY,
                                              FAKE_RANDOM};
    draw random = draw_of(seed + 1);
    fake_options options = fake_defaults();
    options.schedule = schedules[draw_below(&random, 4)];
    options.pump = draw_below(&random, 5) == 0;
    return options;
}

/* The ranks of every other seed are on several hosts. */
static int make_bases(const model *it, size_t n_bytes, pl_comm **out)
{
    static const hosts worlds[] = {{.n_hosts = 2, .n_ranks = {1, 1}},
                                   {.n_hosts = 2, .n_ranks = {2, 1}},
                                   {.n_hosts = 2, .n_ranks = {1, 2}},
                                   {.n_hosts = 3, .n_ranks = {1, 1, 1}}};
    hosts world = worlds[it->world_size == 2 ? 0 : 1 + it->seed / 2 % 3];
    world.deadline_ns = RANKS_DEADLINE_NS;
    world.is_narrow = it->seed / 4 % 2 == 0;
    return it->seed % 2 == 0 && it->world_size == hosts_world_size(&world)
               ? hosts_create(&world, n_bytes, out)
               : CHECK_OK(
                     local_create(it->world_size, n_bytes, RANKS_DEADLINE_NS, out));
}

static int n_late, n_renewed; /* in all lessons of a test */

static void run_lesson(lesson *what)
{
    lesson_run(what, options_of(what->it.seed), make_bases);
    n_late += what->n_late;
    n_renewed += what->n_renewed;
}

/* ---- steps without failures ----------------------------------------------------- */

static void train(gpu_rank *self, const lesson *what)
{
    (void)what;
    for (uint64_t step = 1; step <= N_STEPS; step++)
        if (!gpu_step(self, step))
            break;
    CHECK(self->reducer->learning == LEARNING_DONE);
}

static lesson lesson_of(uint64_t seed, size_t n_params)
{
    return (lesson){.it = model_of(seed, 1 + (int)(seed % 3), n_params),
                    .train = train};
}

TEST(means_are_exact_on_any_number_of_streams)
{
    EACH_SEED (seed, SEEDS) {
        lesson what = lesson_of(seed, 1 + seed * 7 % STEPS_MAX_PARAMS);
        run_lesson(&what);
    }
}

TEST(parameters_that_some_ranks_or_all_leave_out_count_as_zeros)
{
    EACH_SEED (seed, SEEDS) {
        lesson what = lesson_of(10000 + seed, 25);
        what.it.percent_unused = 50;
        run_lesson(&what);
    }
}

TEST(gradients_that_come_again_are_added_or_replaced_also_where_late)
{
    n_late = 0;
    EACH_SEED (seed, SEEDS) {
        lesson what = lesson_of(20000 + seed, 30);
        what.it.percent_twice = 30;
        run_lesson(&what);
    }
    CHECK(n_late > 0 || seeds_of(SEEDS).n < SEEDS);
}

TEST(everything_at_once_comes_out_exact_with_ranks_that_dawdle)
{
    n_renewed = 0;
    EACH_SEED (seed, 2 * SEEDS) {
        lesson what = lesson_of(30000 + seed, 1 + seed % STEPS_MAX_PARAMS);
        what.it.percent_unused = 20;
        what.it.percent_twice = 25;
        what.it.percent_held = 5;
        what.it.rest_ns = seed % 2 == 0 ? 60000 : 0;
        for (size_t i = 0; seed % 5 == 0 && i < what.it.n_params; i += 3)
            what.it.params[i].n_elems = 0;
        run_lesson(&what);
    }
    CHECK(n_renewed > 0 || seeds_of(SEEDS).n < SEEDS);
}

/* ---- ranks that run out of gradients -------------------------------------------- */

static int n_active(const model *it, uint64_t step)
{
    int n = 0;
    for (int r = 0; r < it->world_size; r++)
        n += step_has_batch(it, step, r) != 0;
    return n;
}

static pl_status shadow_step(gpu_rank *self, uint64_t step)
{
    const int is_first = step == self->model->n_batches[self->rank] + 1;
    pl_status st =
        pl_reducer_shadow_step(self->reducer, is_first ? PL_JOINING : PL_SHADOWING);
    memset(self->taken, 0, sizeof self->taken);
    if (st == PL_OK)
        st = pl_reducer_close(self->reducer);
    if (st == PL_OK)
        st = gpu_wait(self);
    if (st == PL_OK && pl_reducer_n_late(self->reducer) > 0)
        st = gpu_amend(self, step);
    return st;
}

static pl_status train_once(gpu_rank *self, uint64_t step)
{
    const pl_status st = gpu_backward(self, step, self->model->n_params);
    return st == PL_OK ? gpu_finish(self, step) : st;
}

static void train_unevenly(gpu_rank *self, const lesson *what)
{
    for (uint64_t step = 1; step <= N_STEPS; step++) {
        const int is_active = step_has_batch(self->model, step, self->rank);
        const int n = n_active(self->model, step);
        if (!CHECK_OK(gpu_begin(self)) ||
            !CHECK_OK((is_active ? train_once : shadow_step)(self, step)))
            return;
        if (what->divides_by_active)
            CHECK_OK(pl_reducer_rescale(self->reducer));
        if (n > 0)
            gpu_check(self, step,
                      what->divides_by_active ? n : self->model->world_size);
        if (!gpu_end(self))
            return;
    }
}

TEST(ranks_that_stand_in_count_as_zeros_or_not_at_all)
{
    EACH_SEED (seed, SEEDS) {
        lesson what = lesson_of(40000 + seed, 20);
        draw random = draw_of(seed);
        what.train = train_unevenly;
        what.divides_by_active = seed % 2 == 0;
        what.it.unit = 6;
        what.it.percent_unused = 10;
        what.it.percent_twice = 20;
        for (int r = 0; r < what.it.world_size; r++)
            what.it.n_batches[r] = 1 + draw_below(&random, N_STEPS - 1);
        run_lesson(&what);
    }
}

/* ---- the steady state ----------------------------------------------------------- */

enum { FIRST_STEADY = 10, N_STEADY = 50 };

static const char *const forbidden[] = {
    "cuMemAlloc",         "cuMemFree",
    "cuEventCreate",      "cuEventDestroy",
    "cuEventSynchronize", "cuStreamSynchronize",
    "cuCtxSynchronize",   "cuStreamCreateWithPriority"};
enum { N_FORBIDDEN = sizeof forbidden / sizeof forbidden[0] };

/* Allocates the memory that any step needs. */
static void warm_up(gpu_rank *self)
{
    block blocks[STEPS_MAX_PARAMS];
    for (size_t s = 0; s < self->n_streams; s++) {
        for (size_t k = 0; k < STEPS_MAX_PARAMS; k++)
            blocks[k] = take_block(self, s);
        for (size_t k = 0; k < STEPS_MAX_PARAMS; k++)
            give_block(self, &blocks[k]);
    }
}

/* A step whose means are not kept. */
static int steady_step(gpu_rank *self, uint64_t step)
{
    const int is_done = gpu_step(self, step);
    for (size_t k = 0; k < GPU_KEPT; k++)
        forget_kept(&self->kept[k]);
    return is_done;
}

static void train_steadily(gpu_rank *self, const lesson *what)
{
    int before[N_FORBIDDEN];
    (void)what;
    warm_up(self);
    self->is_read = 0;
    for (uint64_t step = 1; step < FIRST_STEADY + N_STEADY; step++) {
        if (step == FIRST_STEADY)
            for (size_t k = 0; k < N_FORBIDDEN; k++)
                before[k] = fake_count(forbidden[k]);
        if (!steady_step(self, step))
            return;
        if (step % 4 == 0)
            CHECK(fake_synchronize_all());
    }
    for (size_t k = 0; k < N_FORBIDDEN; k++)
        if (!CHECK(fake_count(forbidden[k]) == before[k]))
            CHECK_MORE("%d calls of %s", fake_count(forbidden[k]) - before[k],
                       forbidden[k]);
}

TEST(a_steady_step_allocates_nothing_and_waits_for_nothing)
{
    for (uint64_t seed = 1; seed <= 4; seed++) {
        lesson what = lesson_of(50000 + seed, 30);
        what.it = model_of(50000 + seed, 1, 30);
        what.it.percent_twice = 20;
        what.it.percent_held = 100; /* so that no gradient is late */
        what.train = train_steadily;
        run_lesson(&what);
    }
}

enum { N_WARM = 3, N_REPLAYS = 3 };

/* Captures a step, replays it, and continues without the graph. */
static void train_by_graph(gpu_rank *self, const lesson *what)
{
    CUstream main_stream = self->streams[0];
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    (void)what;
    warm_up(self);
    self->is_read = 0;
    for (uint64_t step = 1; step <= N_WARM; step++)
        if (!steady_step(self, step))
            return;
    self->is_read = 0;
    for (size_t k = 0; k < self->n_streams; k++) /* as torch's graphs do */
        CHECK(cuStreamSynchronize(self->streams[k]) == 0);
    CHECK(cuStreamBeginCapture(main_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == 0);
    const int n_before = atomic_load(&n_checked);
    CHECK(steady_step(self, N_WARM + 1));
    for (size_t k = 1; k < self->n_streams; k++)
        stream_behind(self, 0, k); /* gradients were freed there */
    if (!CHECK(cuStreamEndCapture(main_stream, &graph) == 0) ||
        !CHECK(cuGraphInstantiate(&exec, graph, 0) == 0))
        return;
    for (int k = 0; k < N_REPLAYS; k++)
        CHECK(cuGraphLaunch(exec, main_stream) == 0);
    CHECK(cuStreamSynchronize(main_stream) == 0);
    CHECK(atomic_load(&n_checked) - n_before >= N_REPLAYS * (int)self->model->n_params);
    for (uint64_t step = N_WARM + 2; step <= N_WARM + 3; step++)
        if (!steady_step(self, step))
            break;
    CHECK(cuStreamSynchronize(main_stream) == 0);
    CHECK(cuGraphExecDestroy(exec) == 0);
    CHECK(cuGraphDestroy(graph) == 0);
}

TEST(a_captured_step_has_exact_means_in_each_replay)
{
    EACH_SEED (seed, SEEDS) {
        lesson what = lesson_of(70000 + seed, 30);
        /* no gradient may be late: all at the end, or each as it comes, once */
        what.it.percent_twice = seed % 2 == 0 ? 20 : 0;
        what.it.percent_held = seed % 2 == 0 ? 100 : 0;
        what.train = train_by_graph;
        run_lesson(&what);
    }
}

/* ---- steps that fail ------------------------------------------------------------ */

enum { N_FAILING_STEPS = 12 };

/* This rank fails in the middle of its backward, or learns that another did. */
static void run_into_accident(gpu_rank *self, uint64_t step, const accident *what)
{
    pl_status st = gpu_begin(self);
    if (self->rank == what->culprit) {
        CHECK_OK(st);
        CHECK_OK(gpu_backward(self, step, what->after_params));
        pl_reducer_fail(self->reducer, what->words);
    } else {
        if (st == PL_OK)
            st = train_once(self, step);
        check_accident(what, self->rank, st);
        pl_reducer_fail(self->reducer, NULL);
    }
    drop_all(self);
}

/* A rank that allocates may wait for a collective that another has given up, and only
 * the watchdog would wake it: so the memory is allocated before. */
static void train_with_accidents(gpu_rank *self, const lesson *what)
{
    uint64_t n_taken = 0;
    (void)what;
    warm_up(self);
    self->percent_flushed = 50;
    for (uint64_t step = 1; step <= N_FAILING_STEPS; step++) {
        const accident next = accident_of(self->model, step);
        draw_rest(self->random, 200000);
        if (next.culprit >= 0)
            run_into_accident(self, step, &next);
        if (next.culprit >= 0 ? !gpu_rank_renew(self) : !gpu_step(self, step))
            break;
        n_taken += next.culprit < 0;
        CHECK(self->reducer->n_taken == n_taken);
    }
}

TEST(after_a_step_that_failed_anywhere_the_next_world_is_exact)
{
    EACH_SEED (seed, SEEDS) {
        lesson what = lesson_of(60000 + seed, 1 + seed % STEPS_MAX_PARAMS);
        what.it.percent_unused = 10;
        what.it.percent_twice = 30;
        what.it.rest_ns = seed % 2 == 0 ? 20000 : 0;
        what.train = train_with_accidents;
        run_lesson(&what);
    }
}
