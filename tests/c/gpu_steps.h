/* gpu_steps.h - the training steps of steps.h on a fake device. */
#ifndef PLT_GPU_STEPS_H
#define PLT_GPU_STEPS_H

#include "gpu_rank.h"

/* ---- a step --------------------------------------------------------------------- */

static inline void *gpu_slot(const gpu_rank *self, size_t i)
{
    return pli_comm_memory(self->comm, pl_reducer_slot_offset(self->reducer, i));
}

/* Makes stream `behind` wait for stream `k`. */
static inline void stream_behind(const gpu_rank *self, size_t behind, size_t k)
{
    if (behind == k)
        return;
    CHECK(cuEventRecord(self->event, self->streams[k]) == 0);
    CHECK(cuStreamWaitEvent(self->streams[behind], self->event, 0) == 0);
}

/* Makes all streams wait for the main one. */
static inline void streams_behind(const gpu_rank *self)
{
    for (size_t k = 1; k < self->n_streams; k++)
        stream_behind(self, k, 0);
}

static inline void launch_fill(const gpu_rank *self, uint64_t step, size_t i,
                               const int range[2], size_t stream, void *out)
{
    if (self->model->params[i].n_elems == 0)
        return; /* a NULL pointer, which torch gives no kernel either */
    fill_args args = {.model = self->model,
                      .step = step,
                      .rank = self->rank,
                      .param = i,
                      .from = range[0],
                      .to = range[1],
                      .out = out};
    launch(self, KERNEL_FILL, stream, &args);
}

/* Views of the last step's means that are kept must keep their values. */
static inline pl_status gpu_refresh_window(gpu_rank *self)
{
    pl_status st = PL_OK;
    if (self->window != NULL && pli_window_n_views(self->window) > 0) {
        st = pli_window_retire(self->window);
        if (st != PL_OK)
            return st;
        pli_window_release(self->window);
        self->window = NULL;
        self->n_renewed++;
    }
    if (self->window == NULL && self->reducer->plan->n_bytes > 0)
        st = pli_window_create(self->comm, self->reducer->at.buckets,
                               self->reducer->plan->n_bytes, self->model->n_params,
                               &self->window);
    return st;
}

static inline pl_status gpu_begin(gpu_rank *self)
{
    pl_reducer_set_stream(self->reducer, stream_of(self, 0));
    const pl_status st = pl_reducer_begin(self->reducer);
    self->n_dropped = 0;
    return st == PL_OK ? gpu_refresh_window(self) : st;
}

/* Keeps a gradient's memory or gives it back, by the result. */
static inline void account(gpu_rank *self, size_t i, block *data,
                           pl_ready_result result)
{
    switch (result) {
    case PL_LATE:
        self->n_late++;
        self->late[i] = *data;
        break;
    case PL_DEFERRED:
        give_block(self, &self->held[i]); /* this one replaces it */
        self->held[i] = *data;
        self->taken[i]++;
        break;
    case PL_COPIED:
        give_block(self, data);
        self->taken[i]++;
        break;
    }
}

/* In even steps further gradients are added; in odd ones a new total replaces the old.
 * The first may be in the slot already. */
static inline pl_status device_grad(gpu_rank *self, uint64_t step, size_t i, int k_grad)
{
    pl_ready_result result = PL_LATE;
    const size_t stream = draw_below(self->random, self->n_streams);
    const int is_total = step % 2 == 1;
    const int range[2] = {is_total ? 0 : k_grad, k_grad + 1};
    pl_write_mode mode = k_grad == 0 || is_total ? PL_REPLACE : PL_ADD;
    block data = {.at = 0};
    void *memory = NULL;
    if (k_grad == 0 && draw_below(self->random, 3) == 0) {
        mode = PL_IN_PLACE;
        memory = gpu_slot(self, i);
    } else {
        data = take_block(self, stream);
        memory = block_memory(&data);
    }
    launch_fill(self, step, i, range, stream, memory);
    pl_status st = pl_reducer_mark_ready(self->reducer, i, memory, mode,
                                         stream_of(self, stream), &result);
    if (st != PL_OK) {
        give_block(self, &data);
        return st;
    }
    CHECK(result != PL_LATE || k_grad > 0);
    CHECK(result != PL_LATE || self->model->params[i].n_elems > 0);
    CHECK(result != PL_LATE || !step_is_held(self->model, step, self->rank, i));
    account(self, i, &data, result);
    if (result == PL_DEFERRED &&
        draw_below(self->random, 100) < self->percent_flushed) {
        st = pl_reducer_flush(self->reducer, i);
        give_block(self, &self->held[i]);
    }
    drop_posted(self);
    return st;
}

static inline pl_status gpu_backward(gpu_rank *self, uint64_t step, size_t n_params)
{
    const model *it = self->model;
    uint32_t order[STEPS_MAX_PARAMS];
    memset(self->taken, 0, sizeof self->taken);
    defer_held(it, step, self->rank, self->reducer);
    streams_behind(self);
    for (int k_grad = 0; k_grad < STEPS_MAX_GRADS; k_grad++) {
        draw_order(self->random, order, it->n_params);
        for (size_t k = 0; k < n_params; k++) {
            if (it->rest_ns > 0)
                draw_rest(self->random, it->rest_ns);
            if (k_grad >= step_n_grads(it, step, self->rank, order[k]))
                continue;
            const pl_status st = device_grad(self, step, order[k], k_grad);
            if (st != PL_OK)
                return st;
        }
    }
    for (size_t k = 1; self->is_joined && k < self->n_streams; k++)
        stream_behind(self, 0, k);
    return PL_OK;
}

static inline pl_status gpu_wait(gpu_rank *self)
{
    const pl_status st = reducer_wait_through(self->reducer);
    return st == PL_OK ? pl_reducer_order(self->reducer) : st;
}

static inline pl_status gpu_amend_one(gpu_rank *self, uint64_t step, size_t i)
{
    const int n_grads = step_n_grads(self->model, step, self->rank, i);
    const int from = step % 2 == 0 ? self->taken[i] : 0;
    const int range[2] = {from, n_grads};
    block total = {.at = 0};
    block *data = &self->late[i];
    if (step % 2 == 1 && from < n_grads) {
        total = take_block(self, 0);
        data = &total;
        launch_fill(self, step, i, range, 0, block_memory(data));
    }
    const pl_status st = pl_reducer_write_late(
        self->reducer, i, from < n_grads ? block_memory(data) : NULL,
        step % 2 == 0 ? PL_ADD : PL_REPLACE);
    give_block(self, &total);
    give_block(self, &self->late[i]);
    return st;
}

static inline pl_status gpu_amend(gpu_rank *self, uint64_t step)
{
    pl_status st = PL_OK;
    for (size_t i = 0; i < self->model->n_params && st == PL_OK; i++)
        if (pl_reducer_is_late(self->reducer, i))
            st = gpu_amend_one(self, step, i);
    if (st == PL_OK)
        st = pl_reducer_close(self->reducer);
    return st == PL_OK ? gpu_wait(self) : st;
}

static inline void put_word(gpu_rank *self, uint64_t step)
{
    word_args args = {.at = pl_reducer_extra(self->reducer), .word = step};
    if (self->reducer->root == self->rank)
        launch(self, KERNEL_PUT_WORD, 0, &args);
}

static inline pl_status gpu_finish(gpu_rank *self, uint64_t step)
{
    put_word(self, step);
    pl_status st = close_step(self->model, step, self->rank, self->reducer);
    if (st == PL_OK) {
        drop_posted(self);
        st = gpu_wait(self);
    }
    if (st == PL_OK && pl_reducer_n_late(self->reducer) > 0)
        st = gpu_amend(self, step);
    return st;
}

/* ---- results -------------------------------------------------------------------- */

static inline void launch_check(const gpu_rank *self, const kept_view *view)
{
    check_args args = {.model = self->model,
                       .step = view->step,
                       .rank = self->rank,
                       .param = view->param,
                       .divisor = view->divisor,
                       .at = view->at};
    launch(self, KERNEL_CHECK, 0, &args);
}

/* Keeps a view of a mean, or drops one; kept views must not have changed. */
static inline void keep_views(gpu_rank *self, uint64_t step, int divisor)
{
    kept_view *one = &self->kept[draw_below(self->random, GPU_KEPT)];
    const size_t i = draw_below(self->random, self->model->n_params);
    for (size_t k = 0; k < GPU_KEPT; k++)
        if (self->kept[k].window != NULL)
            launch_check(self, &self->kept[k]);
    if (draw_below(self->random, 3) > 0)
        return;
    forget_kept(one);
    if (draw_below(self->random, 2) == 0 || self->window == NULL)
        return;
    pli_window_see(self->window, i);
    *one = (kept_view){.window = self->window,
                       .param = i,
                       .at = gpu_slot(self, i),
                       .step = step,
                       .divisor = divisor};
}

/* Call when the step's means are in, before the step's end. */
static inline void gpu_check(gpu_rank *self, uint64_t step, int divisor)
{
    const model *it = self->model;
    CHECK(pl_reducer_n_late(self->reducer) == 0);
    if (pl_reducer_root_is_active(self->reducer)) {
        word_args args = {.at = pl_reducer_extra(self->reducer), .word = step};
        launch(self, KERNEL_CHECK_WORD, 0, &args);
    }
    for (size_t i = 0; i < it->n_params; i++) {
        const kept_view view = {
            .param = i, .at = gpu_slot(self, i), .step = step, .divisor = divisor};
        launch_check(self, &view);
        CHECK(self->held[i].at == 0 && self->late[i].at == 0);
        CHECK((pl_reducer_is_used(self->reducer, i) != 0) ==
              (step_is_used(it, step, i) != 0));
    }
    keep_views(self, step, divisor);
}

static inline int gpu_end(gpu_rank *self)
{
    if (self->is_read && draw_below(self->random, 3) == 0) /* loss.item(), say */
        CHECK(cuStreamSynchronize(self->streams[0]) == 0);
    return CHECK_OK(pl_reducer_end(self->reducer));
}

/* A whole step without a failure. */
static inline int gpu_step(gpu_rank *self, uint64_t step)
{
    if (!CHECK_OK(gpu_begin(self)) ||
        !CHECK_OK(gpu_backward(self, step, self->model->n_params)) ||
        !CHECK_OK(gpu_finish(self, step)))
        return 0;
    gpu_check(self, step, self->model->world_size);
    return gpu_end(self);
}

/* ---- worlds --------------------------------------------------------------------- */

/* What each rank of a world does with its device: train(), or n_steps times step(). */
typedef struct lesson {
    model it;
    pli_nccl_library *nccl;
    succession worlds;
    int divides_by_active;
    void (*train)(gpu_rank *self, const struct lesson *what);
    int (*step)(gpu_rank *self, uint64_t step);
    uint64_t n_steps;
    atomic_int n_late, n_renewed; /* of all ranks, once they are done */
} lesson;

static inline void lesson_rank(rank_job *job)
{
    lesson *what = job->context;
    gpu_rank *self = malloc(sizeof *self);
    if (self == NULL)
        exit(2);
    if (gpu_rank_create(&what->it, job->comm, &what->worlds, what->nccl, &job->random,
                        self)) {
        if (what->train != NULL)
            what->train(self, what);
        for (uint64_t step = 1; step <= what->n_steps; step++)
            if (!what->step(self, step))
                break;
        atomic_fetch_add(&what->n_late, self->n_late);
        atomic_fetch_add(&what->n_renewed, self->n_renewed);
        gpu_rank_destroy(self);
    }
    free(self);
}

/* Resets the fake, and runs the lesson.  make() makes the bases of GPU worlds. */
static inline void lesson_run(lesson *what, fake_options options, world_fn make)
{
    const model *it = &what->it;
    const pl_reducer_spec spec = spec_of(it);
    options.seed = it->seed;
    options.devices = it->world_size;
    options.foreign = 1;
    fake_reset(&options);
    for (size_t k = 0; k < N_STEP_KERNELS; k++)
        fake_register_kernel(step_kernels[k].name, 1, &step_kernels[k].n_bytes,
                             step_kernels[k].run);
    if (!CHECK_OK(pli_nccl_library_open(fake_path(), &what->nccl)))
        return;
    what->worlds.make = make;
    what->worlds.n_bytes = pl_reducer_header_bytes(&spec) + PLI_GPU_BOARD_BYTES;
    succession_run(&what->worlds, it, lesson_rank, what);
    pli_nccl_library_release(what->nccl);
    if (!CHECK(fake_errors() == 0))
        for (int i = 0; fake_error(i) != NULL; i++)
            CHECK_MORE("seed %d: %s", (int)it->seed, fake_error(i));
    /* A communicator whose operations a graph holds may end in a separate thread. */
    for (int i = 0; i < 5000 && fake_live_objects() > 0; i++)
        pli_sleep_ns(PLI_MS);
    if (!CHECK(fake_live_objects() == 0))
        CHECK_MORE("seed %d: %d objects are left", (int)it->seed, fake_live_objects());
}

#endif
