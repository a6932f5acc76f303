/* gpu_inflight.c - a ring of events. */
#include "gpu_inflight.h"

#include "core/alloc.h"

enum { LEAST_SLOTS = 64, MOST_SLOTS = 1024 }; /* a device queues about 1,000 launches */

pl_status pli_inflight_init(pli_inflight *self, pl_backend *backend, size_t n_ops)
{
    pl_status st = PL_OK;
    *self = (pli_inflight){.backend = backend, .n_slots = LEAST_SLOTS};
    (void)pthread_mutex_init(&self->lock, NULL); /* cannot fail on Linux */
    while (self->n_slots < 2 * n_ops && self->n_slots < MOST_SLOTS)
        self->n_slots *= 2;
    PL_TRY(pli_calloc(self->n_slots, sizeof(pl_event *), "operations' events",
                      &self->events));
    PL_TRY(pli_calloc(self->n_slots, sizeof *self->ops, "operations in flight",
                      &self->ops));
    for (size_t i = 0; i < self->n_slots; i++)
        PL_TRY(backend->ops->event_create(backend, &self->events[i]));
done:
    if (st != PL_OK)
        pli_inflight_fini(self);
    return st;
}

void pli_inflight_fini(pli_inflight *self)
{
    if (self->backend == NULL)
        return;
    for (size_t i = 0; self->events != NULL && i < self->n_slots; i++)
        if (self->events[i] != NULL)
            self->backend->ops->event_destroy(self->backend, self->events[i]);
    pli_free(self->events);
    pli_free(self->ops);
    (void)pthread_mutex_destroy(&self->lock);
    *self = (pli_inflight){.backend = NULL};
}

pl_status pli_inflight_record(pli_inflight *self, const pl_op *op, uint64_t step,
                              pl_stream *stream, pl_event **out)
{
    pl_status st = PL_OK;
    const uint64_t n = self->n_recorded + 1; /* only this thread changes it */
    const size_t slot = n & (self->n_slots - 1);
    (void)pthread_mutex_lock(&self->lock);
    self->ops[slot].n = 0;
    (void)pthread_mutex_unlock(&self->lock);
    PL_TRY(self->backend->ops->event_record(self->backend, self->events[slot], stream));
    (void)pthread_mutex_lock(&self->lock);
    if (self->n_done == self->n_recorded)
        self->age = (pli_stopwatch){0};
    self->ops[slot] = (pli_inflight_op){.n = n, .step = step, .op = *op};
    self->n_recorded = n;
    (void)pthread_mutex_unlock(&self->lock);
    *out = self->events[slot];
done:
    return st;
}

/* Queries operation n, unless its event has been reused. */
static pl_status query_locked(pli_inflight *self, uint64_t n, int *out)
{
    const size_t slot = n & (self->n_slots - 1);
    *out = 0;
    if (self->ops[slot].n != n)
        return PL_OK;
    return self->backend->ops->event_is_done(self->backend, self->events[slot], out);
}

pl_status pli_inflight_oldest(pli_inflight *self, pli_inflight_op *out)
{
    pl_status st = PL_OK;
    (void)pthread_mutex_lock(&self->lock);
    const uint64_t n_before = self->n_done;
    /* Later events alone tell about operations older than the ring; the ring's first
     * event may be in the middle of being recorded again. */
    uint64_t n =
        self->n_recorded < self->n_slots ? 1 : self->n_recorded - self->n_slots + 2;
    if (n <= n_before)
        n = n_before + 1;
    for (int is_done = 1; n <= self->n_recorded && is_done; n++) {
        PL_TRY(query_locked(self, n, &is_done));
        if (is_done)
            self->n_done = n;
    }
    if (self->n_done != n_before)
        self->age = (pli_stopwatch){0};
    *out = (pli_inflight_op){.n = 0};
    if (self->n_done < self->n_recorded) {
        const uint64_t oldest = self->n_done + 1;
        const pli_inflight_op *op = &self->ops[oldest & (self->n_slots - 1)];
        *out =
            op->n == oldest ? *op : (pli_inflight_op){.step = op->step, .op = op->op};
        out->n = oldest;
        out->age_ns = pli_elapsed_ns(&self->age);
    }
done:
    (void)pthread_mutex_unlock(&self->lock);
    return st;
}
