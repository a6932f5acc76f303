/* test_reducer_order.c - orderings of a reducer that its usual steps do not need.
 *
 *     test_reducer_order [seeds [first seed]]
 */
#include "gpu_steps.h"
#include "seeds.h"

enum { N_STEPS = 7, N_SEEDS = 12, N_PARAMS = 24 };

static int make_base(const model *it, size_t n_bytes, pl_comm **out)
{
    return CHECK_OK(local_create(it->world_size, n_bytes, RANKS_DEADLINE_NS, out));
}

/* Runs the steps on the fake, in the order that the seed gives. */
static void run_lesson(lesson *what, fake_schedule schedule)
{
    fake_options options = fake_defaults();
    options.schedule = schedule;
    what->n_steps = N_STEPS;
    lesson_run(what, options, make_base);
}

/* Makes a gradient of the first n gradients. */
static block filled(gpu_rank *self, uint64_t step, size_t i, int n, size_t stream)
{
    const int range[2] = {0, n};
    const block data = take_block(self, stream);
    launch_fill(self, step, i, range, stream, block_memory(&data));
    return data;
}

/* Gives the reducer a gradient that a stream made. */
static pl_status deliver(gpu_rank *self, size_t i, block data, size_t stream,
                         pl_ready_result *out)
{
    const pl_status st =
        pl_reducer_mark_ready(self->reducer, i, block_memory(&data), PL_REPLACE,
                              stream_of(self, stream), out);
    if (st != PL_OK) {
        give_block(self, &data);
        return st;
    }
    account(self, i, &data, *out);
    drop_posted(self);
    return PL_OK;
}

/* Begins a step, in which all streams wait for the main one. */
static int begin(gpu_rank *self)
{
    if (!CHECK_OK(gpu_begin(self)))
        return 0;
    streams_behind(self);
    return 1;
}

static int close_buckets(gpu_rank *self, uint64_t step)
{
    put_word(self, step);
    if (!CHECK_OK(pl_reducer_close(self->reducer)))
        return 0;
    drop_posted(self);
    return 1;
}

static int wait_and_end(gpu_rank *self, uint64_t step)
{
    if (!CHECK_OK(gpu_wait(self)) || !CHECK(pl_reducer_n_late(self->reducer) == 0))
        return 0;
    gpu_check(self, step, self->model->world_size);
    return gpu_end(self);
}

/* ---- marked unused before the others come --------------------------------------- */

/* A third of the parameters has earlier gradients, on the main stream; then the others
 * come on another stream, and post the buckets of both. */
static int settle_first(gpu_rank *self, uint64_t step)
{
    const size_t other = self->n_streams - 1;
    if (!begin(self))
        return 0;
    for (size_t i = 0; i < self->model->n_params; i += 3) {
        self->held[i] = filled(self, step, i, 1, 0);
        if (!CHECK_OK(pl_reducer_mark_unused(
                self->reducer, i, block_memory(&self->held[i]), PL_REPLACE, PL_USED)))
            return 0;
    }
    for (size_t i = 0; i < self->model->n_params; i++) {
        pl_ready_result result = PL_LATE;
        if (i % 3 != 0 && !CHECK_OK(deliver(self, i, filled(self, step, i, 1, other),
                                            other, &result)))
            return 0;
    }
    stream_behind(self, 0, other);
    return close_buckets(self, step) && wait_and_end(self, step);
}

TEST(what_was_settled_is_packed_behind_the_stream_that_settled_it)
{
    EACH_SEED (seed, N_SEEDS) {
        lesson what = {.it = model_of(seed, 1 + (int)(seed % 2), N_PARAMS),
                       .step = settle_first};
        run_lesson(&what, seed % 3 == 0 ? FAKE_LATE : FAKE_RANDOM);
    }
}

/* ---- rescaled at once ----------------------------------------------------------- */

static int finish_and_rescale(gpu_rank *self, uint64_t step, int n_active)
{
    if (!close_buckets(self, step) || !CHECK_OK(reducer_wait_through(self->reducer)) ||
        !CHECK_OK(pl_reducer_rescale(self->reducer)) ||
        !CHECK_OK(pl_reducer_order(self->reducer)))
        return 0;
    gpu_check(self, step, n_active);
    return gpu_end(self);
}

/* The last rank has gradients for one step; only rescale orders the means. */
static int rescale_at_once(gpu_rank *self, uint64_t step)
{
    const int last = self->model->world_size - 1;
    if (!CHECK_OK(gpu_begin(self)))
        return 0;
    memset(self->taken, 0, sizeof self->taken);
    if (!step_has_batch(self->model, step, self->rank)) {
        if (!CHECK_OK(pl_reducer_shadow_step(self->reducer,
                                             step == 2 ? PL_JOINING : PL_SHADOWING)))
            return 0;
    } else if (!CHECK_OK(gpu_backward(self, step, self->model->n_params))) {
        return 0;
    }
    return finish_and_rescale(self, step, step == 1 ? last + 1 : last);
}

TEST(means_are_rescaled_behind_the_operations_that_make_them)
{
    EACH_SEED (seed, N_SEEDS) {
        const int world_size = 2 + (int)(seed % 2);
        lesson what = {.it = model_of(seed, world_size, N_PARAMS),
                       .step = rescale_at_once};
        what.it.unit = 6;
        what.it.n_batches[world_size - 1] = 1;
        run_lesson(&what, seed % 3 == 0 ? FAKE_LATE : FAKE_RANDOM);
    }
}

/* ---- after a failed step -------------------------------------------------------- */

/* The gradient is in its slot already. */
static int mark_in_place(gpu_rank *self, uint64_t step, size_t i, size_t stream)
{
    const int range[2] = {0, 1};
    block none = {.at = 0};
    pl_ready_result result = PL_LATE;
    launch_fill(self, step, i, range, stream, gpu_slot(self, i));
    if (pl_reducer_mark_ready(self->reducer, i, gpu_slot(self, i), PL_IN_PLACE,
                              stream_of(self, stream), &result) != PL_OK)
        return 0;
    account(self, i, &none, result);
    drop_posted(self);
    return 1;
}

static atomic_int n_marked; /* ranks */

/* All ranks give up at once, and the world ends while their streams are far behind. */
static int fail_and_leave(gpu_rank *self, uint64_t step)
{
    if (!CHECK_OK(gpu_begin(self)))
        return 0;
    for (size_t i = 0; i < self->model->n_params; i++)
        if (i % 4 != 0 && !CHECK(mark_in_place(self, step, i, 0)))
            return 0;
    atomic_fetch_add(&n_marked, 1);
    while (atomic_load(&n_marked) < self->model->world_size)
        pli_sleep_ns(100000);
    pl_reducer_fail(self->reducer, "given up");
    drop_all(self);
    return 0;
}

TEST(memory_stays_until_what_a_failed_step_writes_is_there)
{
    EACH_SEED (seed, N_SEEDS) {
        lesson what = {.it = model_of(seed, 2, N_PARAMS), .step = fail_and_leave};
        atomic_store(&n_marked, 0);
        run_lesson(&what, seed % 3 == 0 ? FAKE_RANDOM : FAKE_LATE);
    }
}

/* ---- a total that replaces the slot's data -------------------------------------- */

static size_t last_but(const gpu_rank *self, size_t n)
{
    return self->n_streams > n ? self->n_streams - 1 - n : 0;
}

/* The first is written in place on one stream, the total comes on another; the host
 * waits for the total's stream first. */
static int replace_elsewhere(gpu_rank *self, uint64_t step)
{
    const size_t first = last_but(self, 0), second = last_but(self, 1);
    if (!begin(self))
        return 0;
    for (size_t i = 0; i < self->model->n_params; i++) {
        pl_ready_result result = PL_LATE;
        if (!CHECK(mark_in_place(self, step, i, first)) ||
            !CHECK_OK(
                deliver(self, i, filled(self, step, i, 2, second), second, &result)))
            return 0;
    }
    stream_behind(self, 0, second);
    if (!close_buckets(self, step))
        return 0;
    CHECK(cuStreamSynchronize(self->streams[0]) == 0);
    for (size_t k = 1; k <= self->n_streams; k++)
        CHECK(cuStreamSynchronize(self->streams[k == 1 ? second : k - 1]) == 0);
    return wait_and_end(self, step);
}

TEST(a_total_replaces_what_another_stream_has_written)
{
    EACH_SEED (seed, N_SEEDS) {
        lesson what = {.it = model_of(seed, 1 + (int)(seed % 2), N_PARAMS),
                       .step = replace_elsewhere};
        what.it.percent_twice = 100;
        run_lesson(&what, seed % 3 == 0 ? FAKE_RANDOM : FAKE_LATE);
    }
}

/* ---- late ----------------------------------------------------------------------- */

/* Marks each parameter, with a total of `n` gradients; 0: zeros. */
static int mark_all_ready(gpu_rank *self, uint64_t step, int n, size_t stream,
                          int is_late)
{
    for (size_t i = 0; i < self->model->n_params; i++) {
        pl_ready_result result = PL_COPIED;
        if (!CHECK_OK(
                deliver(self, i, filled(self, step, i, n, stream), stream, &result)) ||
            !CHECK((result == PL_LATE) == is_late))
            return 0;
    }
    return 1;
}

static pl_status write_all_late(gpu_rank *self)
{
    pl_status st = PL_OK;
    for (size_t i = 0; st == PL_OK && i < self->model->n_params; i++) {
        st = pl_reducer_write_late(self->reducer, i, block_memory(&self->late[i]),
                                   PL_REPLACE);
        if (i % 2 == 0) /* executes the copy, and only what it waits for */
            CHECK(cuStreamSynchronize(self->streams[0]) == 0);
        give_block(self, &self->late[i]);
    }
    if (st == PL_OK)
        st = pl_reducer_close(self->reducer);
    return st == PL_OK ? gpu_wait(self) : st;
}

/* All parameters get one more gradient, on a stream other than the main one, after
 * their buckets were posted; only the reducer orders that stream and the main one. */
static int fire_late(gpu_rank *self, uint64_t step)
{
    const int is_late = self->reducer->learning == LEARNING_DONE;
    CHECK(is_late || step < N_STEPS);
    if (!begin(self) || !mark_all_ready(self, step, is_late ? 0 : 1, 0, 0) ||
        (is_late && !mark_all_ready(self, step, 1, last_but(self, 0), 1)))
        return 0;
    put_word(self, step);
    if (!CHECK_OK(pl_reducer_close(self->reducer)) || !CHECK_OK(gpu_wait(self)))
        return 0;
    drop_posted(self);
    if (is_late && !CHECK_OK(write_all_late(self)))
        return 0;
    gpu_check(self, step, 1);
    return gpu_end(self) && !is_late; /* from now on two gradients are expected */
}

TEST(what_is_late_is_copied_behind_the_stream_that_made_it)
{
    EACH_SEED (seed, N_SEEDS) {
        lesson what = {.it = model_of(seed, 1, N_PARAMS), .step = fire_late};
        run_lesson(&what, seed % 3 == 0 ? FAKE_RANDOM : FAKE_LATE);
    }
}

/* ---- the end -------------------------------------------------------------------- */

static void read_nothing(gpu_rank *self, const lesson *what)
{
    (void)what;
    self->is_read = 0;
}

/* Of many steps, each of which takes the device seconds. */
TEST(a_world_ends_behind_its_steps_however_much_the_device_has_left_to_do)
{
    lesson what = {
        .it = model_of(6, 2, N_PARAMS), .train = read_nothing, .step = gpu_step};
    atomic_store(&fill_ms, 1000);
    run_lesson(&what, FAKE_LATE);
    atomic_store(&fill_ms, 0);
}
