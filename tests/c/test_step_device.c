/* test_step_device.c - steps on fake devices: exact means and buffers, whatever a
 * program does with its gradients, on any stream, at any speed of the device.
 *
 *     test_step_device [seeds [first seed]]
 */
#include "seeds.h"
#include "tensor_steps.h"

enum { N_STEPS = 8, SEEDS = IS_SANITIZED ? 6 : 16 };

/* ---- steps without failures ----------------------------------------------------- */

static void train(rank_tensors *self)
{
    for (uint64_t step = 1; step <= N_STEPS; step++)
        if (!train_step(self, step))
            break;
}

/* ---- steps of some ranks only --------------------------------------------------- */

static int shadow(rank_tensors *self, uint64_t step)
{
    const int binds = draw_below(self->gpu.random, 2) == 0;
    const int divisor = self->world->it.seed % 2 == 0 ? self->world->it.world_size : 1;
    self->current = 0;
    keep(self);
    streams_behind(&self->gpu); /* the step drops gradients that were read here */
    if (!CHECK_OK(pl_step_shadow(self->step, PL_SHADOWING,
                                 binds ? PL_BINDS_RESULTS : PL_LEAVES_GRADS)))
        return 0;
    check_buffers(self);
    await_buffers(self, step, 0);
    if (binds)
        check_means(self, step, 1, divisor);
    for (size_t i = 0; i < N_PARAMS; i++)
        tensor_check(&self->grads[i]);
    return 1;
}

static void train_unevenly(rank_tensors *self)
{
    const int by_all = self->world->it.seed % 2 == 0;
    pl_step_set_join(self->step, by_all ? PL_BY_WORLD_SIZE : PL_BY_N_ACTIVE,
                     PL_JOIN_GOES_ON);
    for (uint64_t step = 1; step <= N_STEPS; step++) {
        const int is_over = step > 1 + self->world->it.seed % 4;
        if (is_over && self->gpu.rank > 0) {
            if (!shadow(self, step))
                return;
            continue;
        }
        keep(self);
        zero(self);
        if (!CHECK_OK(forward(self, step)) ||
            !CHECK_OK(backward(self, step, N_PARAMS)) || !CHECK_OK(finish(self)))
            return;
        check_means(self, step, is_over ? 1 : 2, is_over && !by_all ? 1 : 2);
        await_buffers(self, step, 0);
    }
}

/* ---- the steady state ----------------------------------------------------------- */

/* Allocates the memory that any step needs. */
static void warm_up(rank_tensors *self)
{
    block blocks[DEVICE_BLOCKS / 2];
    for (size_t s = 0; s < self->gpu.n_streams; s++) {
        for (size_t k = 0; k < DEVICE_BLOCKS / 2; k++)
            blocks[k] = take_block(&self->gpu, s);
        for (size_t k = 0; k < DEVICE_BLOCKS / 2; k++)
            give_block(&self->gpu, &blocks[k]);
    }
}

static void train_steadily(rank_tensors *self)
{
    static const char *const forbidden[] = {
        "cuMemAlloc",         "cuMemFree",
        "cuEventCreate",      "cuEventDestroy",
        "cuEventSynchronize", "cuStreamSynchronize",
        "cuCtxSynchronize",   "cuStreamCreateWithPriority"};
    enum { N_FORBIDDEN = sizeof forbidden / sizeof forbidden[0], FIRST_STEADY = 10 };
    int before[N_FORBIDDEN];
    warm_up(self);
    for (uint64_t step = 1; step < 5 * FIRST_STEADY; step++) {
        for (size_t k = 0; k < N_FORBIDDEN && step == FIRST_STEADY; k++)
            before[k] = fake_count(forbidden[k]);
        zero(self);
        if (!CHECK_OK(forward(self, step)) || !take_step(self, step))
            return;
        await_buffers(self, step, 0);
        if (step % 4 == 0)
            CHECK(fake_synchronize_all());
    }
    for (size_t k = 0; k < N_FORBIDDEN; k++)
        if (!CHECK(fake_count(forbidden[k]) == before[k]))
            CHECK_MORE("%d calls of %s", fake_count(forbidden[k]) - before[k],
                       forbidden[k]);
}

/* ---- steps that fail ------------------------------------------------------------ */

static void run_into_accident(rank_tensors *self, uint64_t step, const accident *what)
{
    pl_status st = forward(self, step);
    const int is_culprit = self->gpu.rank == what->culprit;
    if (st == PL_OK)
        st = backward(self, step, is_culprit ? what->after_params : N_PARAMS);
    if (st == PL_OK && !is_culprit)
        st = finish(self);
    if (is_culprit)
        CHECK_OK(st);
    else
        check_accident(what, self->gpu.rank, st);
    self->settings.n_ends = 0;
    pl_step_fail(self->step, is_culprit ? what->words : NULL);
    self->current = 0;
    zero(self);
}

/* A rank that allocates may wait for a collective that another has given up: so the
 * memory is allocated before. */
static void train_with_accidents(rank_tensors *self)
{
    model whole = self->world->it;
    whole.n_params = N_PARAMS;
    warm_up(self);
    for (uint64_t step = 1; step <= N_STEPS; step++) {
        const accident next = accident_of(&whole, step);
        if (next.culprit >= 0)
            run_into_accident(self, step, &next);
        if (next.culprit >= 0 ? !tensors_renew(self) : !train_step(self, step))
            return;
    }
}

/* Another thread's backward, on its own stream, comes while a step ends. */
static void take_while_a_step_ends(rank_tensors *self)
{
    int is_due = 0;
    for (uint64_t step = 1; step <= 3; step++)
        if (!train_step(self, step))
            return;
    zero(self);
    if (!CHECK_OK(forward(self, 4)) || !CHECK_OK(backward(self, 4, N_PARAMS)))
        return;
    for (size_t k = 1; k < self->gpu.n_streams; k++)
        stream_behind(&self->gpu, 0, k);
    self->current = 0;
    self->settings.n_ends = 0;
    CHECK_OK(pl_step_close(self->step));
    self->current = self->gpu.n_streams - 1;
    CHECK_FAILS(pl_step_take(self->step, 0, PL_ARRIVES_ALONE, &is_due), PL_ESTATE,
                "from two backwards at once");
    CHECK(self->step->stream == stream_of(&self->gpu, 0));
    self->current = 0;
    CHECK_OK(pl_step_finish(self->step));
    check_means(self, 4, 1, 1);
}

/* Autograd adds to a view in place, on any stream; the hook then fails the step, in
 * which the world may have moved to new memory. */
static void fail_at_the_first_gradient(rank_tensors *self)
{
    const uint64_t n_steps = 1 + self->world->it.seed % 3;
    for (uint64_t step = 1; step <= n_steps; step++)
        if (!train_step(self, step))
            return;
    drop_all_kept(self);
    if (!CHECK_OK(forward(self, n_steps + 1)))
        return;
    streams_behind(&self->gpu);
    CHECK_OK(arrive(self, n_steps + 1, draw_below(self->gpu.random, N_PARAMS), 0));
    pl_step_fail(self->step, "the test ends the step");
    self->current = 0;
    self->settings.n_ends = 0;
    zero(self);
}

static void lend_a_view(rank_tensors *self)
{
    const pli_layout layout = param_layout(5, 0);
    int is_due = 0;
    if (!train_step(self, 1) || !train_step(self, 2) || !train_step(self, 3) ||
        !CHECK_OK(forward(self, 4)))
        return;
    tensor_replace(&self->grads[5], tensor_bare(self, &layout));
    self->grads[5].tensor->data = self->grads[8].tensor->data;
    CHECK_FAILS(pl_step_take(self->step, 5, PL_ARRIVES_ALONE, &is_due), PL_ESTATE,
                "parameter 5 is a view of another bucket's memory");
    pl_step_fail(self->step, "the test has lent a gradient");
}

/* ---- captured steps ------------------------------------------------------------- */

enum { N_WARM = 3, N_REPLAYS = 2 };

static CUstream main_stream(const rank_tensors *self)
{
    return self->gpu.streams[0];
}

/* Begins a capture, with no gradient left. */
static void begin_capture(rank_tensors *self)
{
    self->current = 0;
    zero(self);
    for (size_t k = 0; k < self->gpu.n_streams; k++) /* as torch's graphs do */
        CHECK(cuStreamSynchronize(self->gpu.streams[k]) == 0);
    CHECK(cuStreamBeginCapture(main_stream(self),
                               CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == 0);
}

static CUgraph end_capture(const rank_tensors *self)
{
    CUgraph graph = NULL;
    for (size_t k = 1; k < self->gpu.n_streams; k++)
        stream_behind(&self->gpu, 0, k); /* gradients were freed there */
    CHECK(cuStreamEndCapture(main_stream(self), &graph) == 0);
    return graph;
}

/* A gradient that comes while a stream is captured is refused in these words. */
static void check_refused(rank_tensors *self, uint64_t step, const char *words)
{
    CHECK_OK(forward(self, step));
    begin_capture(self);
    streams_behind(&self->gpu);
    CHECK_FAILS(arrive(self, step, 0, 0), PL_ESTATE, words);
    self->current = 0;
    tensor_replace(&self->grads[0], NULL);
    CHECK(cuGraphDestroy(end_capture(self)) == 0);
    self->settings.n_ends = 0;
}

static void replay(const rank_tensors *self, CUgraphExec exec)
{
    const int n_before = atomic_load(&n_checked);
    for (size_t k = 1; k < self->gpu.n_streams; k++)
        stream_behind(&self->gpu, 0, k); /* memory of the graph was freed there */
    CHECK(cuGraphLaunch(exec, main_stream(self)) == 0);
    CHECK(cuStreamSynchronize(main_stream(self)) == 0);
    CHECK(atomic_load(&n_checked) - n_before >= N_PARAMS - 1);
}

/* A replay brings the root's new buffers. */
static void replay_with_buffers(rank_tensors *self, CUgraphExec exec, uint64_t step)
{
    CHECK_OK(pl_step_forward_begins(self->step));
    check_buffers(self);
    for (size_t b = 0; b < N_BUFFERS && self->gpu.rank == 0; b++)
        write_buffer(self, b, buffer_factor(step, 0, b));
    replay(self, exec);
    await_buffers(self, step, 0);
    CHECK_OK(pl_step_forward_begins(self->step));
    check_buffers(self);
}

static void train_by_graph(rank_tensors *self)
{
    CUgraphExec exec = NULL;
    warm_up(self);
    check_refused(self, 1, "before its buckets are in their final order");
    for (uint64_t step = 1; step <= N_WARM; step++)
        if (!train_step(self, step))
            return;
    drop_all_kept(self);
    if (!CHECK_OK(forward(self, 10)))
        return;
    begin_capture(self);
    CHECK(take_step(self, 10));
    await_buffers(self, 10, 0);
    CUgraph graph = end_capture(self);
    if (!CHECK(cuGraphInstantiate(&exec, graph, 0) == 0))
        return;
    for (int k = 0; k < N_REPLAYS; k++)
        replay(self, exec);
    replay_with_buffers(self, exec, 11);
    for (uint64_t step = 12; step <= 15; step++)
        if (!train_step(self, step))
            return;
    drop_all_kept(self);
    zero(self);
    replay(self, exec);
    streams_behind(&self->gpu);
    if (!train_step(self, 16) || !CHECK(cuGraphExecDestroy(exec) == 0))
        return;
    CHECK(cuGraphDestroy(graph) == 0);
}

/* ---- buckets, and what a GPU cannot do ------------------------------------------ */

/* Copies a bucket to a tensor and back, with other values, on another stream. */
static void copy_bucket(rank_tensors *self, size_t b)
{
    const pl_bucket_plan *bucket = &pl_step_look(self->step).plan->buckets[b];
    const size_t n_elems = pl_step_bucket_elems(self->step, b);
    const pli_layout layout = layout_of(1, (int)n_elems, 0);
    pl_grad *flat = tensor_new(self, &layout);
    float *memory = flat->data;
    tensor_fill(flat, -5);
    CHECK_OK(pl_step_copy_bucket(self->step, b, flat->data, PL_FROM_SLOTS));
    for (size_t m = 0; m < bucket->n_params; m++) {
        const size_t i = bucket->params[m];
        flat->layout = param_layout(i, 0);
        tensor_check(&(expected_tensor){flat, self->grads[i].factor});
        tensor_fill(flat, self->grads[i].factor + 1);
        flat->data += flat->layout.n_elems;
        if (self->grads[i].tensor->seen != NULL)
            self->grads[i].factor++;
    }
    CHECK(flat->data == memory + n_elems);
    CHECK_OK(pl_step_copy_bucket(self->step, b, memory, PL_TO_SLOTS));
    for (size_t m = 0; m < bucket->n_params; m++)
        tensor_check(&self->grads[bucket->params[m]]);
    tensor_drop(flat);
}

static void train_and_copy(rank_tensors *self)
{
    for (uint64_t step = 1; step <= N_STEPS; step++) {
        if (!train_step(self, step))
            return;
        streams_behind(&self->gpu);
        self->current = self->gpu.n_streams - 1;
        for (size_t b = 0; b < pl_step_look(self->step).plan->n_buckets; b++)
            copy_bucket(self, b);
        stream_behind(&self->gpu, 0, self->current);
    }
    CHECK_FAILS(pl_step_take_in_context(self->step, 0, 3), PL_EUNSUPPORTED,
                "models on the CPU only");
}

/* ---- worlds --------------------------------------------------------------------- */

static tensor_world world_of(uint64_t seed)
{
    const int world_size = seed % 8 > 5 ? 4 : 1 + (seed % 4 > 0);
    return (tensor_world){.it = {.seed = seed, .world_size = world_size},
                          .keeps_grads = seed % 5 > 2,
                          .train = train};
}

TEST(means_and_buffers_are_exact_on_any_number_of_streams)
{
    EACH_SEED (seed, SEEDS) {
        tensor_world world = world_of(seed);
        world.it.percent_unused = seed % 2 == 0 ? 20 : 0;
        tensors_run(&world);
        CHECK(world.n_views > 0);
    }
}

TEST(late_gradients_are_added_in_any_layout)
{
    int n_late = 0;
    EACH_SEED (seed, SEEDS) {
        tensor_world world = world_of(10000 + seed);
        world.it.percent_twice = 30;
        world.percent_strided = seed % 2 == 0 ? 30 : 0;
        tensors_run(&world);
        n_late += world.n_late;
    }
    CHECK(n_late > 0 || seeds_of(SEEDS).n < SEEDS);
}

TEST(gradients_grow_over_steps)
{
    EACH_SEED (seed, SEEDS) {
        tensor_world world = world_of(20000 + seed);
        world.percent_grown = 60;
        world.it.percent_unused = 60;
        tensors_run(&world);
    }
}

TEST(hooks_and_graphs_of_the_user_see_no_view_before_the_end)
{
    EACH_SEED (seed, SEEDS) {
        tensor_world world = world_of(30000 + seed);
        world.percent_hooks = 40;
        world.percent_grown = 30;
        world.percent_recorded = 30;
        tensors_run(&world);
    }
}

TEST(everything_at_once_comes_out_exact)
{
    EACH_SEED (seed, 2 * SEEDS) {
        tensor_world world = world_of(40000 + seed);
        world.it.percent_unused = 20;
        world.it.percent_twice = 25;
        world.percent_hooks = 15;
        world.percent_strided = 20;
        world.percent_grown = 30;
        world.percent_recorded = 15;
        world.it.rest_ns = seed % 3 == 0 ? 60000 : 0;
        tensors_run(&world);
    }
}

TEST(ranks_that_stand_in_take_the_means_and_leave_old_gradients_alone)
{
    EACH_SEED (seed, SEEDS) {
        tensor_world world = world_of(50000 + seed);
        world.it.world_size = 2;
        world.it.percent_unused = 20;
        world.keeps_grads = 0;
        world.train = train_unevenly;
        tensors_run(&world);
    }
}

TEST(a_steady_step_allocates_nothing_and_waits_for_nothing)
{
    EACH_SEED (seed, 4) {
        tensor_world world = world_of(55000 + seed);
        world.it.world_size = 1;
        world.train = train_steadily;
        tensors_run(&world);
    }
}

TEST(after_a_step_that_failed_anywhere_the_next_world_is_exact)
{
    EACH_SEED (seed, SEEDS) {
        tensor_world world = world_of(60000 + seed);
        world.it.percent_twice = 20;
        world.percent_strided = 20;
        world.percent_grown = 30;
        world.train = train_with_accidents;
        tensors_run(&world);
    }
}

TEST(a_step_that_fails_at_its_first_gradient_leaves_no_memory_in_use)
{
    EACH_SEED (seed, 2 * SEEDS) {
        tensor_world world = world_of(65000 + 4 * seed); /* a device that is late */
        world.it.world_size = 1;
        world.train = fail_at_the_first_gradient;
        tensors_run(&world);
    }
}

TEST(a_gradient_that_is_refused_leaves_the_step_its_stream)
{
    EACH_SEED (seed, SEEDS) {
        tensor_world world = world_of(67000 + seed);
        world.it.world_size = 1;
        world.train = take_while_a_step_ends;
        tensors_run(&world);
    }
}

TEST(a_gradient_in_another_buckets_memory_is_refused)
{
    EACH_SEED (seed, 3) {
        tensor_world world = world_of(70000 + seed);
        world.it.world_size = 1;
        world.train = lend_a_view;
        tensors_run(&world);
    }
}

TEST(a_captured_step_is_exact_in_each_replay)
{
    EACH_SEED (seed, SEEDS) {
        tensor_world world = world_of(80000 + seed);
        world.train = train_by_graph;
        tensors_run(&world);
    }
}

TEST(buckets_are_copied_on_the_stream_of_the_caller)
{
    EACH_SEED (seed, SEEDS / 2) {
        tensor_world world = world_of(90000 + seed);
        world.train = train_and_copy;
        tensors_run(&world);
    }
}
