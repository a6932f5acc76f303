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
    accumulate(self, i, grad);
    const pl_status st = pl_step_take(
        self->step, i, has_hooks ? PL_ARRIVES_AFTER_HOOKS : PL_ARRIVES_ALONE, &is_due);
    if (st == PL_OK && has_hooks) /* a later hook changes it */
        tensor_fill(self->grads[i].tensor, -77);
    return st;
}

static pl_status forward(rank_tensors *self, uint64_t step)
{
    pl_status st = PL_OK;
    (void)step;
    self->current = 0;
    PL_TRY(pl_step_forward_begins(self->step));
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

/* The means are over `n_ranks`; those after the first `n_active` have no gradients. */
static void check_means(rank_tensors *self, uint64_t step, int n_active)
{
    for (size_t i = 0; i < N_PARAMS; i++) {
        expected_tensor *it = &self->grads[i];
        int is_used = 0;
        double sum = 0;
        for (int r = 0; r < n_active; r++) {
            is_used |= n_grads(self, step, r, i) > 0;
            for (int k = 0; k < n_grads(self, step, r, i); k++)
                sum += factor_of(self, step, r, i, k);
        }
        CHECK(!is_used || it->tensor != NULL);
        it->factor += sum / self->world->it.world_size;
        self->world->n_views += it->tensor != NULL && it->tensor->window != NULL;
        tensor_check(it);
    }
}

/* Sets the gradients to none; some of them are kept. */
static void zero(rank_tensors *self)
{
    for (size_t k = 0; k < N_KEPT; k++) {
        const size_t i = draw_below(self->gpu.random, N_PARAMS);
        tensor_check(&self->kept[k]);
        if (draw_below(self->gpu.random, 3) > 0)
            continue;
        streams_behind(&self->gpu);
        tensor_replace(&self->kept[k], NULL);
        if (draw_below(self->gpu.random, 2) == 0)
            continue;
        self->kept[k] = self->grads[i];
        (void)hold_maybe(self->kept[k].tensor);
    }
    tensors_zero(self);
    for (size_t i = 0; i < N_PARAMS; i++)
        self->grads[i].factor = 0;
}

static int train_step(rank_tensors *self, uint64_t step)
{
    const tensor_world *world = self->world;
    if (!step_is_any(self, step, 6, world->percent_grown))
        zero(self);
    self->is_recorded = step_is_any(self, step, 7, world->percent_recorded);
    if (!CHECK_OK(forward(self, step)) || !CHECK_OK(backward(self, step, N_PARAMS)) ||
        !CHECK_OK(finish(self)))
        return 0;
    check_means(self, step, world->it.world_size);
    return 1;
}

static void train(rank_tensors *self)
{
    for (uint64_t step = 1; step <= N_STEPS; step++)
        if (!train_step(self, step))
            break;
}

/* ---- worlds --------------------------------------------------------------------- */

static tensor_world world_of(uint64_t seed)
{
    return (tensor_world){.it = {.seed = seed, .world_size = 1 + (seed % 4 > 0)},
                          .train = train};
}

TEST(means_are_exact_on_any_number_of_streams)
{
    EACH_SEED (seed, SEEDS) {
        tensor_world world = world_of(seed);
        tensors_run(&world);
        CHECK(world.n_views > 0);
    }
}
