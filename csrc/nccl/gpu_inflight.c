/* gpu_inflight.c - a ring of events. */
#include "gpu_inflight.h"

#include "core/alloc.h"
#include "core/clock.h"

enum { LEAST_SLOTS = 64, MOST_SLOTS = 1024 }; /* a device takes about 1,000 launches */

pl_status pli_inflight_init(pli_inflight *it, pl_backend *backend, size_t n_ops)
{
    pl_status st = PL_OK;
    *it = (pli_inflight){.backend = backend, .n_slots = LEAST_SLOTS};
    (void)pthread_mutex_init(&it->lock, NULL); /* cannot fail on Linux */
    while (it->n_slots < 2 * n_ops && it->n_slots < MOST_SLOTS)
        it->n_slots *= 2;
    PL_TRY(
        pli_calloc(it->n_slots, sizeof(pl_event *), "operations' events", &it->events));
    PL_TRY(pli_calloc(it->n_slots, sizeof *it->ops, "operations in flight", &it->ops));
    for (size_t i = 0; i < it->n_slots; i++)
        PL_TRY(backend->ops->event_create(backend, &it->events[i]));
done:
    if (st != PL_OK)
        pli_inflight_fini(it);
    return st;
}

void pli_inflight_fini(pli_inflight *it)
{
    if (it->backend == NULL)
        return;
    for (size_t i = 0; it->events != NULL && i < it->n_slots; i++)
        if (it->events[i] != NULL)
            it->backend->ops->event_destroy(it->backend, it->events[i]);
    pli_free(it->events);
    pli_free(it->ops);
    (void)pthread_mutex_destroy(&it->lock);
    *it = (pli_inflight){.backend = NULL};
}

pl_status pli_inflight_record(pli_inflight *it, const pl_op *op, uint64_t step,
                              pl_stream *stream, pl_event **out)
{
    pl_status st = PL_OK;
    const uint64_t n = it->n_recorded + 1; /* this thread alone changes it */
    const size_t slot = n & (it->n_slots - 1);
    (void)pthread_mutex_lock(&it->lock);
    it->ops[slot].n = 0;
    (void)pthread_mutex_unlock(&it->lock);
    PL_TRY(it->backend->ops->event_record(it->backend, it->events[slot], stream));
    const int64_t now = pli_now_ns();
    (void)pthread_mutex_lock(&it->lock);
    if (it->n_done == it->n_recorded)
        it->since_ns = now;
    it->ops[slot] = (pli_inflight_op){.n = n, .step = step, .op = *op};
    it->n_recorded = n;
    (void)pthread_mutex_unlock(&it->lock);
    *out = it->events[slot];
done:
    return st;
}

/* Asks about operation n, if its event is still its own. */
static pl_status query_locked(pli_inflight *it, uint64_t n, int *out)
{
    const size_t slot = n & (it->n_slots - 1);
    *out = 0;
    if (it->ops[slot].n != n)
        return PL_OK;
    return it->backend->ops->event_is_done(it->backend, it->events[slot], out);
}

pl_status pli_inflight_oldest(pli_inflight *it, pli_inflight_op *out)
{
    pl_status st = PL_OK;
    (void)pthread_mutex_lock(&it->lock);
    const uint64_t n_before = it->n_done;
    /* Of those before the ring's first nothing is known but by later ones; the first is
     * maybe being recorded anew. */
    uint64_t n = it->n_recorded < it->n_slots ? 1 : it->n_recorded - it->n_slots + 2;
    if (n <= n_before)
        n = n_before + 1;
    for (int is_done = 1; n <= it->n_recorded && is_done; n++) {
        PL_TRY(query_locked(it, n, &is_done));
        if (is_done)
            it->n_done = n;
    }
    if (it->n_done != n_before)
        it->since_ns = pli_now_ns();
    *out = (pli_inflight_op){.n = 0};
    if (it->n_done < it->n_recorded) {
        const uint64_t oldest = it->n_done + 1;
        const pli_inflight_op *op = &it->ops[oldest & (it->n_slots - 1)];
        *out =
            op->n == oldest ? *op : (pli_inflight_op){.step = op->step, .op = op->op};
        out->n = oldest;
        out->since_ns = it->since_ns;
    }
done:
    (void)pthread_mutex_unlock(&it->lock);
    return st;
}

void pli_inflight_forget(pli_inflight *it)
{
    (void)pthread_mutex_lock(&it->lock);
    it->n_done = it->n_recorded;
    (void)pthread_mutex_unlock(&it->lock);
}
