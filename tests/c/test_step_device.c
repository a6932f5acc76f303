/* test_step_device.c - steps on fake devices: exact means and buffers, whatever a
 * program does with its gradients, on any stream, at any speed of the device.
 *
 *     test_step_device [seeds [first seed]]
 */
#include "seeds.h"
#include "step_tensors.h"

enum { N_STEPS = 8, SEEDS = IS_SANITIZED ? 10 : 24 };

/* ---- what the ranks draw alike -------------------------------------------------- */

static int n_grads(const rank_tensors *self, uint64_t step, int rank, size_t i)
{
    const model *it = &self->world->it;
    if (step_percent(it, step, rank, i, 1) < it->percent_unused)
        return 0;
    return 1 + (!param_has_hooks(self, i) &&
                step_percent(it, step, rank, i, 2) < it->percent_twice);
}

static double factor_of(const rank_tensors *self, uint64_t step, int rank, size_t i,
                        int k_grad)
{
    const model *it = &self->world->it;
    return it->world_size *
           (1 + (int)step_percent(it, step, rank, i, 10 + (unsigned)k_grad));
}

static int step_is_any(const rank_tensors *self, uint64_t step, unsigned salt,
                       unsigned percent)
{
    return step_percent(&self->world->it, step, 0, N_PARAMS, salt) < percent;
}

static size_t stream_of_param(const rank_tensors *self, size_t i)
{
    return step_percent(&self->world->it, 0, self->gpu.rank, i, 3) %
           self->gpu.n_streams;
}

/* ---- a step --------------------------------------------------------------------- */

/* Adds a gradient to `.grad` as autograd does; takes over the reference. */
static void accumulate(rank_tensors *self, size_t i, pl_grad *grad)
{
    pl_grad *before = self->grads[i].tensor;
    if (before == NULL) {
        self->grads[i].tensor = grad;
        return;
    }
    if (self->is_recorded) {
        tensor_write(grad, before, 1);
        stream_behind(&self->gpu, before->memory.stream, self->current);
        tensor_replace(&self->grads[i], grad);
    } else {
        tensor_write(before, grad, 1);
        tensor_drop(grad);
    }
}

static pl_status arrive(rank_tensors *self, uint64_t step, size_t i, int k_grad)
{
    const int is_strided = step_percent(&self->world->it, step, self->gpu.rank, i, 4) <
                           self->world->percent_strided;
    const pli_layout layout = param_layout(i, is_strided);
    const int has_hooks = param_has_hooks(self, i);
    int is_due = 0;
    self->current = stream_of_param(self, i);
    pl_grad *grad = tensor_new(self, &layout);
    tensor_fill(grad, factor_of(self, step, self->gpu.rank, i, k_grad));
    grad->own_writes = 0; /* autograd has not added to it */
    accumulate(self, i, grad);
    const pl_status st = pl_step_take(
        self->step, i, has_hooks ? PL_ARRIVES_AFTER_HOOKS : PL_ARRIVES_ALONE, &is_due);
    if (st == PL_OK && has_hooks) /* a later hook changes it */
        tensor_fill(self->grads[i].tensor, -77);
    return st;
}

static double buffer_factor(uint64_t step, int rank, size_t b)
{
    return (double)(1000 * (rank + 1)) + (double)(10 * step + b);
}

static void check_buffers(rank_tensors *self)
{
    for (size_t b = 0; b < N_BUFFERS; b++) {
        if (self->takes_over[b])
            self->buffers[b].factor = buffer_factor(self->last_step, 0, b);
        self->takes_over[b] = 0;
        tensor_check(&self->buffers[b]);
    }
}

static void write_buffer(rank_tensors *self, size_t b, double factor)
{
    tensor_fill(self->buffers[b].tensor, factor);
    self->buffers[b].factor = factor;
}

/* A step was taken: the next forward takes over the root's buffers, but not those that
 * were written in the meantime. */
static void await_buffers(rank_tensors *self, uint64_t step, int writes)
{
    const size_t b = draw_below(self->gpu.random, N_BUFFERS);
    self->last_step = step;
    for (size_t k = 0; k < N_BUFFERS; k++)
        self->takes_over[k] = self->gpu.rank > 0;
    if (!writes || self->gpu.rank == 0)
        return;
    write_buffer(self, b, buffer_factor(step, 7, b));
    self->takes_over[b] = 0;
    if (b < 2) /* these two share a count of writes */
        self->takes_over[0] = self->takes_over[1] = 0;
}

static pl_status forward(rank_tensors *self, uint64_t step)
{
    pl_status st = PL_OK;
    self->current = 0;
    PL_TRY(pl_step_forward_begins(self->step));
    check_buffers(self);
    for (size_t b = 0; b < N_BUFFERS; b++)
        write_buffer(self, b, buffer_factor(step, self->gpu.rank, b));
    const uint64_t token =
        pl_step_forward_ends(self->step, PL_OUTPUTS_WATCHED, PL_TRAINS);
    PL_TRY(pl_step_output(self->step, token, 1));
done:
    return st;
}

static pl_status backward(rank_tensors *self, uint64_t step, size_t n_params)
{
    pl_status st = PL_OK;
    uint32_t order[N_PARAMS];
    streams_behind(&self->gpu);
    for (int k_grad = 0; k_grad < 2; k_grad++) {
        draw_order(self->gpu.random, order, N_PARAMS);
        for (size_t k = 0; k < n_params; k++)
            if (k_grad < n_grads(self, step, self->gpu.rank, order[k]))
                PL_TRY(arrive(self, step, order[k], k_grad));
    }
done:
    return st;
}

static pl_status finish(rank_tensors *self)
{
    for (size_t i = 0; i < N_PARAMS; i++)
        self->world->n_late += pl_reducer_is_late(self->step->reducer, i) != 0;
    for (size_t k = 1; k < self->gpu.n_streams; k++)
        stream_behind(&self->gpu, 0, k);
    self->current = 0;
    self->settings.n_ends = 0;
    return pl_step_look(self->step).is_active ? pl_step_finish(self->step) : PL_OK;
}

/* The first `n_active` ranks have gradients. */
static void check_means(rank_tensors *self, uint64_t step, int n_active, int divisor)
{
    for (size_t i = 0; i < N_PARAMS; i++) {
        expected_tensor *it = &self->grads[i];
        if (i == EMPTY_PARAM) /* its gradient, at NULL, counts as none */
            continue;
        const int is_active = self->gpu.rank < n_active;
        int is_used = 0;
        double sum = 0;
        for (int r = 0; r < n_active; r++) {
            is_used |= n_grads(self, step, r, i) > 0;
            for (int k = 0; k < n_grads(self, step, r, i); k++)
                sum += factor_of(self, step, r, i, k);
        }
        CHECK(is_used ? it->tensor != NULL : is_active || it->tensor == NULL);
        it->factor = sum / divisor + (is_active ? it->factor : 0);
        self->world->n_views += it->tensor != NULL && it->tensor->window != NULL;
        tensor_check(it);
    }
}

static void drop_kept(rank_tensors *self, size_t k)
{
    streams_behind(&self->gpu);
    tensor_replace(&self->kept[k], NULL);
}

/* Keeps some gradients, and drops others; kept ones must not have changed. */
static void keep(rank_tensors *self)
{
    for (size_t k = 0; k < N_KEPT; k++) {
        const size_t i = draw_below(self->gpu.random, N_PARAMS);
        tensor_check(&self->kept[k]);
        if (draw_below(self->gpu.random, 3) > 0)
            continue;
        drop_kept(self, k);
        if (draw_below(self->gpu.random, 2) == 0)
            continue;
        self->kept[k] = self->grads[i];
        (void)hold_maybe(self->kept[k].tensor);
    }
}

static void zero(rank_tensors *self)
{
    tensors_zero(self);
    for (size_t i = 0; i < N_PARAMS; i++)
        self->grads[i].factor = 0;
}

/* Another view of a gradient; NULL: it is not one. */
static pl_grad *alias(rank_tensors *self, const pl_grad *grad)
{
    if (grad == NULL || grad->window == NULL)
        return NULL;
    pl_grad *it = tensor_bare(self, &grad->layout);
    it->data = grad->data;
    it->window = grad->window;
    it->slot = grad->slot;
    pli_window_see(it->window, it->slot);
    return it;
}

static int take_step(rank_tensors *self, uint64_t step)
{
    const int world_size = self->world->it.world_size;
    if (!CHECK_OK(backward(self, step, N_PARAMS)) || !CHECK_OK(finish(self)))
        return 0;
    check_means(self, step, world_size, world_size);
    return 1;
}

static int train_step(rank_tensors *self, uint64_t step)
{
    const tensor_world *world = self->world;
    pl_grad *before[N_PARAMS];
    pl_grad *other = NULL;
    self->current = 0;
    if (!step_is_any(self, step, 6, world->percent_grown)) {
        keep(self);
        zero(self);
    } else if (draw_below(self->gpu.random, 3) == 0) {
        other = alias(self, self->grads[draw_below(self->gpu.random, N_PARAMS)].tensor);
    }
    for (size_t i = 0; i < N_PARAMS; i++)
        before[i] = self->grads[i].tensor;
    self->is_recorded = step_is_any(self, step, 7, world->percent_recorded);
    if (!CHECK_OK(forward(self, step)) || !take_step(self, step))
        return 0;
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK(before[i] == NULL || !world->keeps_grads || self->is_recorded ||
              self->grads[i].tensor == before[i]);
    tensor_drop(other);
    await_buffers(self, step, draw_below(self->gpu.random, 3) == 0);
    return 1;
}

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

/* ---- steps that fail ------------------------------------------------------------ */

/* A rank that allocates may wait for a collective that another has given up: so the
 * memory is allocated before. */
static void warm_up(rank_tensors *self)
{
    block blocks[GPU_BLOCKS / 2];
    for (size_t s = 0; s < self->gpu.n_streams; s++) {
        for (size_t k = 0; k < GPU_BLOCKS / 2; k++)
            blocks[k] = take_block(&self->gpu, s);
        for (size_t k = 0; k < GPU_BLOCKS / 2; k++)
            give_block(&self->gpu, &blocks[k]);
    }
}

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

static void replace_in_use(rank_tensors *self)
{
    const pli_layout layout = param_layout(5, 0);
    int is_due = 0;
    if (!train_step(self, 1) || !train_step(self, 2) || !train_step(self, 3) ||
        !CHECK_OK(forward(self, 4)))
        return;
    for (size_t k = 0; k < N_KEPT; k++)
        drop_kept(self, k);
    streams_behind(&self->gpu);
    CHECK_OK(arrive(self, 4, 8, 0));
    self->current = 0;
    self->kept[0] = self->grads[5];
    self->grads[5].tensor = tensor_new(self, &layout);
    tensor_fill(self->grads[5].tensor, 3);
    CHECK_FAILS(pl_step_take(self->step, 5, PL_ARRIVES_ALONE, &is_due), PL_ESTATE,
                "parameter 5 was replaced during backward");
    pl_step_fail(self->step, "the test has replaced a gradient");
}

/* ---- worlds --------------------------------------------------------------------- */

static tensor_world world_of(uint64_t seed)
{
    return (tensor_world){.it = {.seed = seed, .world_size = 1 + (seed % 4 > 0)},
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

TEST(gradients_grow_over_steps_whoever_keeps_views_of_them)
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

TEST(a_gradient_in_use_may_not_be_replaced_during_backward)
{
    EACH_SEED (seed, 3) {
        tensor_world world = world_of(70000 + seed);
        world.it.world_size = 1;
        world.train = replace_in_use;
        tensors_run(&world);
    }
}
