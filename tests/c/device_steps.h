/* device_steps.h - the training steps of steps.h on a fake device. */
#ifndef PLT_DEVICE_STEPS_H
#define PLT_DEVICE_STEPS_H

#include "device_rank.h"

/* ---- a step -------------------------------------------------------------------------
 */

static inline void *device_slot(const device_rank *self, size_t i)
{
    return pli_comm_memory(self->comm, pl_reducer_slot_offset(self->reducer, i));
}

/* Stream `behind` comes behind stream `k`. */
static inline void stream_behind(const device_rank *self, size_t behind, size_t k)
{
    if (behind == k)
        return;
    CHECK(cuEventRecord(self->event, self->streams[k]) == 0);
    CHECK(cuStreamWaitEvent(self->streams[behind], self->event, 0) == 0);
}

static inline void launch_fill(const device_rank *self, uint64_t step, size_t i,
                               const int fires[2], size_t stream, void *out)
{
    fill_args args = {.model = self->model,
                      .step = step,
                      .rank = self->rank,
                      .param = i,
                      .from = fires[0],
                      .to = fires[1],
                      .out = out};
    launch(self, KERNEL_FILL, stream, &args);
}

/* Whoever keeps views of the last step's means keeps their values. */
static inline pl_status device_refresh_window(device_rank *self)
{
    pl_status st = PL_OK;
    size_t offset = 0, n_bytes = 0;
    if (self->window != NULL && pli_window_n_views(self->window) > 0) {
        st = pli_window_retire(self->window);
        if (st != PL_OK)
            return st;
        pli_window_release(self->window);
        self->window = NULL;
        self->n_renewed++;
    }
    pl_reducer_buckets(self->reducer, &offset, &n_bytes);
    if (self->window == NULL && n_bytes > 0)
        st = pli_window_create(self->comm, offset, n_bytes, self->model->n_params,
                               &self->window);
    return st;
}

static inline pl_status device_begin(device_rank *self)
{
    pl_reducer_set_stream(self->reducer, stream_of(self, 0));
    const pl_status st = pl_reducer_begin(self->reducer);
    self->n_dropped = 0;
    return st == PL_OK ? device_refresh_window(self) : st;
}

/* What becomes of a gradient's memory. */
static inline void account(device_rank *self, size_t i, block *data, pl_verdict verdict)
{
    switch (verdict) {
    case PL_LATE:
        self->n_late++;
        self->late[i] = *data;
        break;
    case PL_HELD:
        give_block(self, &self->held[i]); /* which this one replaces */
        self->held[i] = *data;
        self->taken[i]++;
        break;
    case PL_TAKEN:
        give_block(self, data);
        self->taken[i]++;
        break;
    }
}

/* In even steps what comes again is added, in odd ones a new total replaces the old;
 * the first may be in the slot already. */
static inline pl_status device_fire(device_rank *self, uint64_t step, size_t i,
                                    int fire)
{
    pl_verdict verdict = PL_LATE;
    const size_t stream = draw_below(self->random, self->n_streams);
    const int is_total = step % 2 == 1;
    const int fires[2] = {is_total ? 0 : fire, fire + 1};
    pl_delivery delivery = fire == 0 || is_total ? PL_REPLACE : PL_ADD;
    block data = {.at = 0};
    void *memory = NULL;
    if (fire == 0 && !self->has_failed && draw_below(self->random, 3) == 0) {
        delivery = PL_IN_PLACE;
        memory = device_slot(self, i);
    } else {
        data = take_block(self, stream);
        memory = block_memory(&data);
    }
    launch_fill(self, step, i, fires, stream, memory);
    pl_status st = pl_reducer_deliver(self->reducer, i, memory, delivery,
                                      stream_of(self, stream), &verdict);
    if (st != PL_OK) {
        give_block(self, &data);
        return st;
    }
    CHECK(verdict != PL_LATE || fire > 0);
    CHECK(verdict != PL_LATE || self->model->params[i].n_elems > 0);
    CHECK(verdict != PL_LATE || !step_is_held(self->model, step, self->rank, i));
    account(self, i, &data, verdict);
    if (verdict == PL_HELD && draw_below(self->random, 100) < self->percent_flushed) {
        st = pl_reducer_flush(self->reducer, i);
        give_block(self, &self->held[i]);
    }
    drop_posted(self);
    return st;
}

static inline pl_status device_backward(device_rank *self, uint64_t step,
                                        size_t n_params)
{
    const model *it = self->model;
    uint32_t order[STEPS_MAX_PARAMS];
    for (size_t i = 0; i < it->n_params; i++) {
        self->taken[i] = 0;
        if (step_is_held(it, step, self->rank, i))
            pl_reducer_hold(self->reducer, i);
    }
    for (size_t k = 1; k < self->n_streams; k++)
        stream_behind(self, k, 0);
    for (int fire = 0; fire < STEPS_MAX_FIRES; fire++) {
        draw_order(self->random, order, it->n_params);
        for (size_t k = 0; k < n_params; k++) {
            if (it->rest_ns > 0)
                draw_rest(self->random, it->rest_ns);
            if (fire >= step_n_fires(it, step, self->rank, order[k]))
                continue;
            const pl_status st = device_fire(self, step, order[k], fire);
            if (st != PL_OK)
                return st;
        }
    }
    for (size_t k = 1; self->is_joined && k < self->n_streams; k++)
        stream_behind(self, 0, k);
    return PL_OK;
}

static inline pl_status device_wait(device_rank *self)
{
    pl_status st = PL_EAGAIN;
    while (st == PL_EAGAIN)
        st = pl_reducer_wait(self->reducer, RANKS_SLICE_NS);
    return st == PL_OK ? pl_reducer_order(self->reducer) : st;
}

static inline pl_status device_amend_one(device_rank *self, uint64_t step, size_t i)
{
    const int n_fires = step_n_fires(self->model, step, self->rank, i);
    const int from = step % 2 == 0 ? self->taken[i] : 0;
    const int fires[2] = {from, n_fires};
    block total = {.at = 0};
    block *data = &self->late[i];
    if (step % 2 == 1 && from < n_fires) {
        total = take_block(self, 0);
        data = &total;
        launch_fill(self, step, i, fires, 0, block_memory(data));
    }
    const pl_status st =
        pl_reducer_amend(self->reducer, i, from < n_fires ? block_memory(data) : NULL,
                         step % 2 == 0 ? PL_ADD : PL_REPLACE);
    give_block(self, &total);
    give_block(self, &self->late[i]);
    return st;
}

static inline pl_status device_amend(device_rank *self, uint64_t step)
{
    pl_status st = PL_OK;
    for (size_t i = 0; i < self->model->n_params && st == PL_OK; i++)
        if (pl_reducer_is_late(self->reducer, i))
            st = device_amend_one(self, step, i);
    if (st == PL_OK)
        st = pl_reducer_close(self->reducer);
    return st == PL_OK ? device_wait(self) : st;
}

static inline pl_status device_finish(device_rank *self, uint64_t step)
{
    const model *it = self->model;
    pl_status st = PL_OK;
    if (pl_reducer_root(self->reducer) == self->rank) {
        word_args args = {.at = pl_reducer_extra(self->reducer), .word = step};
        launch(self, KERNEL_PUT_WORD, 0, &args);
    }
    for (size_t i = 0; i < it->n_params && st == PL_OK; i++)
        if (step_n_fires(it, step, self->rank, i) == 0)
            st = pl_reducer_settle(self->reducer, i, NULL, PL_REPLACE, PL_UNUSED);
    if (st == PL_OK)
        st = pl_reducer_close(self->reducer);
    if (st == PL_OK) {
        drop_posted(self);
        st = device_wait(self);
    }
    if (st == PL_OK && pl_reducer_n_late(self->reducer) > 0)
        st = device_amend(self, step);
    return st;
}

/* ---- what has come of it
 * --------------------------------------------------------------
 */

static inline void launch_check(const device_rank *self, const kept_view *view)
{
    check_args args = {.model = self->model,
                       .step = view->step,
                       .rank = self->rank,
                       .param = view->param,
                       .divisor = view->divisor,
                       .at = view->at};
    launch(self, KERNEL_CHECK, 0, &args);
}

/* Keeps a mean, or lets one go; those that are kept are what they were. */
static inline void keep_views(device_rank *self, uint64_t step, int divisor)
{
    kept_view *one = &self->kept[draw_below(self->random, DEVICE_KEPT)];
    const size_t i = draw_below(self->random, self->model->n_params);
    for (size_t k = 0; k < DEVICE_KEPT; k++)
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
                       .at = device_slot(self, i),
                       .step = step,
                       .divisor = divisor};
}

/* After the step's means are in, and before its end. */
static inline void device_check(device_rank *self, uint64_t step, int divisor)
{
    const model *it = self->model;
    CHECK(pl_reducer_n_late(self->reducer) == 0);
    if (pl_reducer_root_is_active(self->reducer)) {
        word_args args = {.at = pl_reducer_extra(self->reducer), .word = step};
        launch(self, KERNEL_CHECK_WORD, 0, &args);
    }
    for (size_t i = 0; i < it->n_params; i++) {
        const kept_view view = {
            .param = i, .at = device_slot(self, i), .step = step, .divisor = divisor};
        launch_check(self, &view);
        CHECK(self->held[i].at == 0 && self->late[i].at == 0);
        CHECK((pl_reducer_is_used(self->reducer, i) != 0) ==
              (step_is_used(it, step, i) != 0));
    }
    keep_views(self, step, divisor);
}

static inline pl_status device_recover(device_rank *self)
{
    pl_status st = PL_EAGAIN;
    while (st == PL_EAGAIN)
        st = pl_reducer_recover(self->reducer, RANKS_SLICE_NS);
    return st;
}

static inline int device_end(device_rank *self)
{
    if (self->is_read && draw_below(self->random, 3) == 0) /* loss.item(), say */
        CHECK(cuStreamSynchronize(self->streams[0]) == 0);
    return CHECK_OK(pl_reducer_end(self->reducer));
}

/* A whole step that nothing disturbs. */
static inline int device_step(device_rank *self, uint64_t step)
{
    if (!CHECK_OK(device_recover(self)) || !CHECK_OK(device_begin(self)) ||
        !CHECK_OK(device_backward(self, step, self->model->n_params)) ||
        !CHECK_OK(device_finish(self, step)))
        return 0;
    device_check(self, step, self->model->world_size);
    self->has_failed = 0;
    return device_end(self);
}

#endif
