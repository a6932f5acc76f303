/* step_ranks.h - a rank whose gradients are arrays: its step, and its backward. */
#ifndef PLT_STEP_RANKS_H
#define PLT_STEP_RANKS_H

#include "step_arrays.h"

/* ---- what else a step asks ------------------------------------------------------ */

static inline pl_status arrays_await_end(void *context, pl_end_origin origin)
{
    pl_status st = PL_OK;
    rank_arrays *self = context;
    PL_TRY(arrays_call(context, CALL_AWAIT_END));
    if (origin == PL_END_OF_LOCAL_OUTPUT)
        self->n_local_ends++;
    else if (self->settings.n_ends == 0)
        self->settings.n_ends++;
done:
    return st;
}

static inline pl_status arrays_is_recorded(void *context, int *out)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_IS_RECORDED));
    *out = arrays_of(context)->is_recorded;
done:
    return st;
}

static inline int arrays_has_hooks(void *context, size_t i)
{
    return arrays_of(context)->has_hooks[i];
}

static inline void *arrays_let_go(void *context)
{
    rank_arrays *self = context;
    CHECK(!self->is_let_go);
    self->is_let_go = 1;
    return self;
}

static inline void arrays_take_back(void *lock)
{
    rank_arrays *self = lock;
    if (self == NULL)
        return;
    CHECK(self->is_let_go);
    self->is_let_go = 0;
}

static inline pl_status arrays_check_signals(void *context)
{
    return arrays_call(context, CALL_CHECK_SIGNALS);
}

static inline pl_status arrays_current_stream(void *context, pl_stream **out)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_CURRENT_STREAM));
    *out = NULL;
done:
    return st;
}

static inline pl_status arrays_finished(void *context)
{
    arrays_of(context)->n_finished++;
    return arrays_call(context, CALL_FINISHED);
}

static const pl_grad_ops arrays_ops = {
    .find = arrays_find,
    .read_arrived = arrays_read_arrived,
    .read = arrays_read,
    .hold = array_hold,
    .drop = array_drop,
    .put = arrays_put,
    .put_back = arrays_put_back,
    .over = arrays_over,
    .empty_like = arrays_empty_like,
    .clone = arrays_clone,
    .copy = arrays_copy,
    .add = arrays_add,
    .note_write = arrays_note_write,
    .n_writes = arrays_n_writes,
    .find_buffer = arrays_find_buffer,
    .read_rows = arrays_read_rows,
    .make_rows = arrays_make_rows,
    .to_sparse = arrays_to_sparse,
    .put_mean = arrays_put_mean,
};

static const pl_step_host arrays_host = {
    .await_end = arrays_await_end,
    .is_recorded = arrays_is_recorded,
    .has_hooks = arrays_has_hooks,
    .let_go = arrays_let_go,
    .take_back = arrays_take_back,
    .check_signals = arrays_check_signals,
    .current_stream = arrays_current_stream,
    .finished = arrays_finished,
};

/* ---- a rank begins and ends ----------------------------------------------------- */

/* What the spec points to. */
typedef struct arrays_spec {
    pl_step_spec spec;
    pli_layout layouts[ARRAYS_MOST_PARAMS];
    pli_layout *refs[ARRAYS_MOST_PARAMS];
    unsigned char is_sparse[ARRAYS_MOST_PARAMS];
    pl_buffer_spec buffers[ARRAYS_MOST_BUFFERS];
} arrays_spec;

static inline void arrays_make_spec(const array_model *model, int world_size,
                                    arrays_spec *out)
{
    *out = (arrays_spec){.spec = {.layouts = out->refs,
                                  .is_sparse = out->is_sparse,
                                  .n_params = model->n_params,
                                  .buffers = out->buffers,
                                  .n_buffers = model->n_buffers,
                                  .view_bytes = model->view_bytes,
                                  .world_size = world_size,
                                  .caps = model->caps}};
    for (size_t i = 0; i < model->n_params; i++) {
        out->layouts[i] = layout_of(model->params[i].n_rows, model->params[i].n_cols);
        out->refs[i] = &out->layouts[i];
        out->is_sparse[i] = model->params[i].is_sparse;
    }
    for (size_t b = 0; b < model->n_buffers; b++)
        out->buffers[b].n_bytes = model->buffer_elems[b] * sizeof(float);
}

static inline pl_status arrays_measure(const array_model *model, int world_size,
                                       pl_step_size *out)
{
    arrays_spec make;
    arrays_make_spec(model, world_size, &make);
    return pl_step_measure(&make.spec, out);
}

/* `comm` is borrowed.  *out stays where it is. */
static inline pl_status arrays_create(const array_model *model, pl_comm *comm,
                                      rank_arrays *out)
{
    pl_status st = PL_OK;
    arrays_spec make;
    *out = (rank_arrays){.model = model,
                         .rank = pl_comm_rank(comm),
                         .world_size = pl_comm_world_size(comm),
                         .comm = comm,
                         .settings = {.is_on = 1},
                         .fault = {.hit = N_ARRAY_CALLS}};
    arrays_make_spec(model, out->world_size, &make);
    make.spec.grads = &arrays_ops;
    make.spec.host = &arrays_host;
    make.spec.settings = &out->settings;
    make.spec.context = out;
    for (size_t b = 0; b < model->n_buffers; b++) {
        const pli_layout layout = layout_of(1, (int)model->buffer_elems[b]);
        out->buffers[b] = array_new(out, &layout);
    }
    PL_TRY(pli_cpu_backend_create(&out->backend));
    PL_TRY(pl_step_create(&make.spec, comm, out->backend, &out->step));
    PL_TRY(pl_step_prepare(out->step));
done:
    return st;
}

/* The step drops what it holds; then all arrays are gone. */
static inline void arrays_destroy(rank_arrays *self)
{
    pl_step_destroy(self->step);
    for (size_t i = 0; i < ARRAYS_MOST_PARAMS; i++)
        arrays_set_grad(self, i, NULL);
    for (size_t b = 0; b < ARRAYS_MOST_BUFFERS; b++)
        array_drop(self->buffers[b]);
    CHECK(self->n_alive == 0);
    CHECK(!self->is_let_go);
    pli_backend_destroy(self->backend);
}

/* Runs the model's ranks as threads of one world, each with its own rank_arrays. */
static inline void arrays_run(const array_model *model, int world_size,
                              void (*run)(rank_job *job), void *context, uint64_t seed)
{
    pl_step_size size;
    if (CHECK_OK(arrays_measure(model, world_size, &size)))
        ranks_run_world(world_size, size.arena_bytes, run, context, seed);
}

/* ---- a backward ----------------------------------------------------------------- */

/* Adds a gradient to `.grad`, as autograd does; takes over the reference. */
static inline void arrays_accumulate(rank_arrays *self, size_t i, pl_grad *grad)
{
    float sums[ARRAYS_MOST_ELEMS];
    pl_grad *before = self->grads[i];
    if (before == NULL) {
        self->grads[i] = grad;
        return;
    }
    const int is_mixed = before->n_sparse_dims > 0 && grad->n_sparse_dims == 0;
    if (!self->is_recorded && !is_mixed) {
        array_add(before, grad);
        array_drop(grad);
        return;
    }
    /* A recorded sum is a new tensor, and so is that of a sparse and a dense one. */
    for (size_t k = 0; k < before->layout.n_elems; k++)
        sums[k] = array_get(before, k) + array_get(grad, k);
    pl_grad *sum = before->n_sparse_dims > 0 && !is_mixed
                       ? array_sparse_of(self, &before->layout, sums)
                       : array_dense_of(self, &grad->layout, sums);
    array_drop(grad);
    arrays_set_grad(self, i, sum);
}

/* Backward has produced a gradient, to which the user's hooks have been applied. */
static inline pl_status arrays_arrive(rank_arrays *self, size_t i, pl_grad *grad,
                                      pl_arrival arrival)
{
    int is_due = 0;
    if (grad != NULL)
        arrays_accumulate(self, i, grad);
    const pl_status st = pl_step_take(self->step, i, arrival, &is_due);
    CHECK(st != PL_OK || is_due == 0 || self->settings.is_compiled);
    return st != PL_OK || !is_due ? st : pl_step_finish(self->step);
}

/* The backward is over: calls what was queued for its end. */
static inline pl_status arrays_end_backward(rank_arrays *self)
{
    for (; self->n_local_ends > 0; self->n_local_ends--)
        pl_step_end_local(self->step);
    if (self->settings.n_ends == 0)
        return PL_OK;
    self->settings.n_ends--;
    return pl_step_look(self->step).is_active ? pl_step_finish(self->step) : PL_OK;
}

/* The caller reports a failure, as the binding does when a backward raises. */
static inline void arrays_fail(rank_arrays *self)
{
    char text[256];
    (void)snprintf(text, sizeof text, "%s", pl_error_message());
    self->settings.n_ends = 0;
    self->n_local_ends = 0;
    pl_step_fail(self->step, text);
}

static inline int arrays_count_held(pl_grad *grad, void *n)
{
    CHECK(grad->n_refs > 0);
    ++*(size_t *)n;
    return 0;
}

/* Number of arrays that the step refers to. */
static inline size_t arrays_n_in_step(const rank_arrays *self)
{
    size_t n = 0;
    (void)pl_step_visit(self->step, arrays_count_held, &n);
    return n;
}

/* Number of arrays that the test knows: `.grad` and the buffers. */
static inline long arrays_n_known(const rank_arrays *self)
{
    long n = 0;
    for (size_t i = 0; i < ARRAYS_MOST_PARAMS; i++)
        n += self->grads[i] != NULL;
    for (size_t b = 0; b < ARRAYS_MOST_BUFFERS; b++)
        n += self->buffers[b] != NULL;
    return n;
}

/* Sets all gradients to none. */
static inline void arrays_zero(rank_arrays *self)
{
    for (size_t i = 0; i < self->model->n_params; i++)
        arrays_set_grad(self, i, NULL);
}

#endif
