/* tensor_steps.h - training steps of a rank with tensors of a fake device: what all
 * ranks draw alike, forward, backward and end of a step, and the checks of its means.
 */
#ifndef PLT_TENSOR_STEPS_H
#define PLT_TENSOR_STEPS_H

#include "step_tensors.h"

/* ---- what the ranks draw alike -------------------------------------------------- */

static inline int n_grads(const rank_tensors *self, uint64_t step, int rank, size_t i)
{
    const model *it = &self->world->it;
    if (i > 0 && step_percent(it, step, rank, i, 1) < it->percent_unused)
        return 0; /* the first is always used: each rank takes each step */
    return 1 + (!param_has_hooks(self, i) &&
                step_percent(it, step, rank, i, 2) < it->percent_twice);
}

static inline double factor_of(const rank_tensors *self, uint64_t step, int rank,
                               size_t i, int k_grad)
{
    const model *it = &self->world->it;
    return it->world_size *
           (1 + (int)step_percent(it, step, rank, i, 10 + (unsigned)k_grad));
}

static inline int step_is_any(const rank_tensors *self, uint64_t step, unsigned salt,
                              unsigned percent)
{
    return step_percent(&self->world->it, step, 0, N_PARAMS, salt) < percent;
}

static inline size_t stream_of_param(const rank_tensors *self, size_t i)
{
    return step_percent(&self->world->it, 0, self->gpu.rank, i, 3) %
           self->gpu.n_streams;
}

/* ---- a step --------------------------------------------------------------------- */

/* Adds a gradient to `.grad` as autograd does; takes over the reference.  Memory that
 * the world has left belongs to its views: as with any tensor of torch's, whoever
 * writes to them on another stream records it. */
static inline void accumulate(rank_tensors *self, size_t i, pl_grad *grad)
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
        if (before->seen != NULL && !is_overwritten(self, before))
            fake_torch_record(before->seen->address, self->gpu.streams[self->current]);
        tensor_write(before, grad, 1);
        tensor_drop(grad);
    }
}

/* Nothing is retained for a bucket that is posted. */
static inline void check_released(const rank_tensors *self)
{
    const pl_reducer *reducer = self->step->reducer;
    for (size_t b = 0; b < reducer->n_posted; b++)
        for (size_t m = 0; m < reducer->plan->buckets[b].n_params; m++)
            CHECK(self->step->slots[reducer->plan->buckets[b].params[m]].retained ==
                  NULL);
}

static inline pl_status arrive(rank_tensors *self, uint64_t step, size_t i, int k_grad)
{
    const int is_strided = step_percent(&self->world->it, step, self->gpu.rank, i, 4) <
                           self->world->percent_strided;
    const pli_layout layout = param_layout(i, is_strided);
    const int has_hooks = param_has_hooks(self, i);
    int is_due = 0;
    if (self->world->it.rest_ns > 0)
        draw_rest(self->gpu.random, self->world->it.rest_ns);
    self->current = stream_of_param(self, i);
    pl_grad *grad = tensor_new(self, &layout);
    tensor_fill(grad, factor_of(self, step, self->gpu.rank, i, k_grad));
    grad->own_writes = 0; /* autograd has not added to it */
    accumulate(self, i, grad);
    const pl_status st = pl_step_take(
        self->step, i, has_hooks ? PL_ARRIVES_AFTER_HOOKS : PL_ARRIVES_ALONE, &is_due);
    if (st == PL_OK)
        check_released(self);
    if (st == PL_OK && has_hooks) /* a later hook changes it */
        tensor_fill(self->grads[i].tensor, -77);
    return st;
}

static inline double buffer_factor(uint64_t step, int rank, size_t b)
{
    return (double)(1000 * (rank + 1)) + (double)(10 * step + b);
}

static inline void check_buffers(rank_tensors *self)
{
    for (size_t b = 0; b < N_BUFFERS; b++) {
        if (self->takes_over[b])
            self->buffers[b].factor = buffer_factor(self->last_step, 0, b);
        self->takes_over[b] = 0;
        tensor_check(&self->buffers[b]);
    }
}

static inline void write_buffer(rank_tensors *self, size_t b, double factor)
{
    tensor_fill(self->buffers[b].tensor, factor);
    self->buffers[b].factor = factor;
}

/* A step was taken: the next forward takes over the root's buffers, but not those that
 * were written in the meantime. */
static inline void await_buffers(rank_tensors *self, uint64_t step, int writes)
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

static inline pl_status forward(rank_tensors *self, uint64_t step)
{
    pl_status st = PL_OK;
    self->current = step % self->gpu.n_streams;
    stream_behind(&self->gpu, self->current, 0);
    PL_TRY(pl_step_forward_begins(self->step));
    check_buffers(self);
    stream_behind(&self->gpu, 0, self->current);
    self->current = 0;
    for (size_t b = 0; b < N_BUFFERS; b++)
        write_buffer(self, b, buffer_factor(step, self->gpu.rank, b));
    const uint64_t token =
        pl_step_forward_ends(self->step, PL_OUTPUTS_WATCHED, PL_TRAINS);
    PL_TRY(pl_step_output(self->step, token, 1));
done:
    return st;
}

static inline pl_status backward(rank_tensors *self, uint64_t step, size_t n_params)
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

static inline pl_status finish(rank_tensors *self)
{
    pl_status st = PL_OK;
    for (size_t i = 0; i < N_PARAMS; i++)
        self->world->n_late += pl_reducer_is_late(self->step->reducer, i) != 0;
    for (size_t k = 1; k < self->gpu.n_streams; k++)
        stream_behind(&self->gpu, 0, k);
    self->current = 0;
    self->settings.n_ends = 0;
    PL_TRY(pl_step_close(self->step));
    check_released(self);
    if (pl_step_look(self->step).is_active)
        PL_TRY(pl_step_finish(self->step));
done:
    return st;
}

/* The first `n_active` ranks have gradients. */
static inline void check_means(rank_tensors *self, uint64_t step, int n_active,
                               int divisor)
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
        self->world->n_views += it->tensor != NULL && it->tensor->seen != NULL;
        tensor_check(it);
    }
}

static inline void drop_kept(rank_tensors *self, size_t k)
{
    streams_behind(&self->gpu);
    tensor_replace(&self->kept[k], NULL);
}

static inline void drop_all_kept(rank_tensors *self)
{
    for (size_t k = 0; k < N_KEPT; k++)
        drop_kept(self, k);
}

/* Keeps some gradients, and drops others; kept ones must not have changed. */
static inline void keep(rank_tensors *self)
{
    for (size_t k = 0; k < N_KEPT; k++) {
        const size_t i = draw_below(self->gpu.random, N_PARAMS);
        if (is_overwritten(self, self->kept[k].tensor))
            drop_kept(self, k);
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

static inline void zero(rank_tensors *self)
{
    tensors_zero(self);
    for (size_t i = 0; i < N_PARAMS; i++)
        self->grads[i].factor = 0;
}

static inline int take_step(rank_tensors *self, uint64_t step)
{
    const int world_size = self->world->it.world_size;
    if (!CHECK_OK(backward(self, step, N_PARAMS)) || !CHECK_OK(finish(self)))
        return 0;
    check_means(self, step, world_size, world_size);
    return 1;
}

/* Overwrites the gradients to which no rank adds in this step. */
static inline void fill_unused(rank_tensors *self, uint64_t step, double factor)
{
    for (size_t i = 0; i < N_PARAMS; i++) {
        int is_used = 0;
        for (int r = 0; r < self->world->it.world_size; r++)
            is_used |= n_grads(self, step, r, i) > 0;
        if (is_used || self->grads[i].tensor == NULL)
            continue;
        self->grads[i].factor = factor;
        tensor_fill(self->grads[i].tensor, factor);
    }
}

/* Before a step that adds to gradients. */
static inline void use_grads(rank_tensors *self, uint64_t step)
{
    const int rank = self->gpu.rank;
    const size_t k = draw_below(self->gpu.random, N_KEPT);
    const size_t kept = draw_below(self->gpu.random, N_PARAMS);
    fill_unused(self, step, 1 + rank); /* a value of its own, which stays */
    /* A recorded sum is a new tensor, so the old one stays as it is. */
    if (self->is_recorded && n_grads(self, step, rank, kept) > 0 &&
        !is_overwritten(self, self->grads[kept].tensor)) {
        drop_kept(self, k);
        self->kept[k] = self->grads[kept];
        (void)hold_maybe(self->kept[k].tensor);
    }
}

static inline int train_step(rank_tensors *self, uint64_t step)
{
    const tensor_world *world = self->world;
    pl_grad *before[N_PARAMS];
    self->current = 0;
    self->is_recorded = step_is_any(self, step, 7, world->percent_recorded);
    if (!step_is_any(self, step, 6, world->percent_grown)) {
        keep(self);
        zero(self);
    } else {
        use_grads(self, step);
    }
    for (size_t i = 0; i < N_PARAMS; i++)
        before[i] = self->grads[i].tensor;
    if (!CHECK_OK(forward(self, step)) || !take_step(self, step))
        return 0;
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK(before[i] == NULL || !world->keeps_grads || self->is_recorded ||
              self->grads[i].tensor == before[i]);
    fill_unused(self, step, 6);
    await_buffers(self, step, draw_below(self->gpu.random, 3) == 0);
    return 1;
}

#endif
