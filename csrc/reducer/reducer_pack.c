/* reducer_pack.c - defers copies, packs buckets, and orders the streams of both. */
#include "reducer_pack.h"

#include <string.h>

#include "core/alloc.h"
#include "reducer_state.h"

/* ---- life ----------------------------------------------------------------------- */

pl_status pli_deferred_copies_init(pl_reducer *self)
{
    pl_status st = PL_OK;
    deferred_copies *deferred = &self->deferred;
    const size_t n = self->spec.n_params;
    if (self->backend->ops->batching == PL_MOVE_AT_ONCE)
        goto done;
    PL_TRY(
        pli_calloc(n, sizeof *deferred->copies, "deferred copies", &deferred->copies));
    PL_TRY(
        pli_calloc(n, sizeof *deferred->batch, "a bucket's moves", &deferred->batch));
    PL_TRY(
        pli_calloc(n, sizeof(pl_stream *), "a bucket's streams", &deferred->streams));
    PL_TRY(pli_calloc(n, sizeof(pl_event *), "buckets' events", &deferred->ready));
    PL_TRY(pli_calloc(n, sizeof(pl_event *), "a failed step's events",
                      &deferred->pending));
    PL_TRY(self->backend->ops->event_create(self->backend, &deferred->any_event));
    PL_TRY(self->backend->ops->event_create(self->backend, &deferred->side_event));
done:
    return st;
}

static void destroy_events(pl_reducer *self, pl_event *const *events, size_t n)
{
    for (size_t k = 0; k < n; k++)
        self->backend->ops->event_destroy(self->backend, events[k]);
}

void pli_deferred_copies_fini(pl_reducer *self)
{
    deferred_copies *deferred = &self->deferred;
    if (!pli_reducer_defers(deferred))
        return;
    destroy_events(self, deferred->ready, deferred->n_ready);
    destroy_events(self, deferred->pending, deferred->n_pending_made);
    if (deferred->any_event != NULL)
        destroy_events(self, &deferred->any_event, 1);
    if (deferred->side_event != NULL)
        destroy_events(self, &deferred->side_event, 1);
    pli_free(deferred->copies);
    pli_free(deferred->batch);
    pli_free(deferred->streams);
    pli_free(deferred->ready);
    pli_free(deferred->pending);
}

pl_status pli_deferred_copies_make_room(pl_reducer *self, size_t n_buckets)
{
    pl_status st = PL_OK;
    deferred_copies *deferred = &self->deferred;
    while (pli_reducer_defers(deferred) && deferred->n_ready < n_buckets) {
        PL_TRY(self->backend->ops->event_create(self->backend,
                                                &deferred->ready[deferred->n_ready]));
        deferred->n_ready++;
    }
done:
    return st;
}

void pli_deferred_copies_begin(pl_reducer *self)
{
    if (pli_reducer_defers(&self->deferred))
        memset(self->deferred.copies, 0,
               self->spec.n_params * sizeof *self->deferred.copies);
}

/* ---- the order of streams ------------------------------------------------------- */

/* Makes later work on `waiter` wait for the work that `stream` has now. */
static pl_status stream_wait(pl_reducer *self, pl_stream *waiter, pl_stream *stream)
{
    pl_status st = PL_OK;
    pl_backend *backend = self->backend;
    if (waiter == stream)
        goto done;
    PL_TRY(backend->ops->event_record(backend, self->deferred.any_event, stream));
    PL_TRY(backend->ops->event_wait(backend, self->deferred.any_event, waiter));
done:
    return st;
}

/* Before `stream` writes to a slot: pending work of a failed step may write there too.
 * If that was captured, and its graph dropped, there is nothing to wait for, and the
 * event gives an error. */
static void stream_wait_pending(pl_reducer *self, pl_stream *stream)
{
    for (size_t k = 0; k < self->deferred.n_pending; k++)
        (void)self->backend->ops->event_wait(self->backend, self->deferred.pending[k],
                                             stream);
}

static void add_stream(pl_stream **streams, size_t *n_streams, pl_stream *stream)
{
    for (size_t k = 0; k < *n_streams; k++)
        if (streams[k] == stream)
            return;
    streams[(*n_streams)++] = stream;
}

pl_status pli_reducer_record_side(pl_reducer *self, pl_stream *stream, pl_event **out)
{
    pl_status st = PL_OK;
    if (!pli_reducer_defers(&self->deferred)) {
        *out = NULL;
        goto done;
    }
    PL_TRY(self->backend->ops->event_record(self->backend, self->deferred.side_event,
                                            stream));
    *out = self->deferred.side_event;
done:
    return st;
}

void pli_deferred_copies_abandon(pl_reducer *self)
{
    deferred_copies *deferred = &self->deferred;
    const pl_backend_ops *ops = self->backend->ops;
    size_t n_streams = 0;
    if (!pli_reducer_defers(deferred))
        return;
    for (size_t i = 0; i < self->spec.n_params; i++)
        if (deferred->copies[i].state != COPY_NONE)
            add_stream(deferred->streams, &n_streams, deferred->copies[i].stream);
    for (size_t k = 0; k < n_streams; k++)
        stream_wait_pending(self, deferred->streams[k]); /* what was pending stays so */
    for (size_t k = 0; k < n_streams; k++) {
        if (k == deferred->n_pending_made) {
            if (ops->event_create(self->backend, &deferred->pending[k]) != PL_OK)
                break;
            deferred->n_pending_made++;
        }
        (void)ops->event_record(self->backend, deferred->pending[k],
                                deferred->streams[k]);
    }
    for (size_t k = 0; self->comm->device != NULL && k < n_streams; k++)
        self->comm->device->follow(self->comm, deferred->streams[k]);
    if (n_streams > 0)
        deferred->n_pending =
            n_streams < deferred->n_pending_made ? n_streams : deferred->n_pending_made;
}

/* ---- deferring ------------------------------------------------------------------ */

/* Makes the deferred copy of a parameter, on the stream that made the gradient. */
static pl_status flush(pl_reducer *self, size_t param)
{
    pl_status st = PL_OK;
    deferred_copy *copy = &self->deferred.copies[param];
    if (copy->state != COPY_DEFERRED)
        goto done;
    const pl_move move = slot_move(self, param, copy->data);
    stream_wait_pending(self, copy->stream);
    PL_TRY(self->backend->ops->copy(self->backend, &move, 1, copy->stream));
    *copy = (deferred_copy){.stream = copy->stream, .state = COPY_IN_SLOT};
done:
    return st;
}

/* Adds to the slot, after the stream that wrote it. */
static pl_status add_now(pl_reducer *self, size_t param, const void *data,
                         pl_stream *stream)
{
    pl_status st = PL_OK;
    deferred_copy *copy = &self->deferred.copies[param];
    const pl_move move = slot_move(self, param, data);
    PL_TRY(flush(self, param));
    if (copy->state == COPY_IN_SLOT)
        PL_TRY(stream_wait(self, stream, copy->stream));
    stream_wait_pending(self, stream);
    PL_TRY(self->backend->ops->add(self->backend, &move, 1, stream));
    *copy = (deferred_copy){.stream = stream, .state = COPY_IN_SLOT};
done:
    return st;
}

pl_status pli_reducer_defer(pl_reducer *self, size_t param, const void *data,
                            pl_write_mode mode, pl_stream *stream, pl_ready_result *out)
{
    pl_status st = PL_OK;
    deferred_copy *copy = &self->deferred.copies[param];
    pl_ready_result result = PL_COPIED;
    if (self->params[param].n_elems == 0)
        goto done;
    if (mode == PL_ADD) {
        if (data != NULL)
            PL_TRY(add_now(self, param, data, stream));
    } else {
        if (copy->state == COPY_IN_SLOT)
            PL_TRY(stream_wait(self, stream, copy->stream));
        *copy = (deferred_copy){.data = data, .stream = stream, .state = COPY_DEFERRED};
        if (mode == PL_IN_PLACE)
            copy->state = COPY_IN_SLOT;
        else if (data != NULL)
            result = PL_DEFERRED;
    }
done:
    if (st == PL_OK)
        *out = result;
    return st;
}

pl_status pl_reducer_flush(pl_reducer *self, size_t param)
{
    const size_t b = self->plan->slots[param].bucket;
    if (!pli_reducer_defers(&self->deferred) || self->phase != REDUCER_FILLING ||
        self->buckets[b].phase == BUCKET_POSTED)
        return PL_OK;
    return flush(self, param);
}

/* ---- packing -------------------------------------------------------------------- */

/* Lists the moves of a bucket, and the streams other than `stream` that took part. */
static size_t list_moves(pl_reducer *self, size_t b, const pl_stream *stream,
                         size_t *n_streams)
{
    deferred_copies *deferred = &self->deferred;
    const pl_bucket_plan *bucket = &self->plan->buckets[b];
    char *memory = pli_comm_memory(self->comm, self->at.buckets);
    size_t n_moves = 0;
    for (size_t m = 0; m < bucket->n_params; m++) {
        const size_t i = bucket->params[m];
        const deferred_copy *copy = &deferred->copies[i];
        if (copy->state == COPY_NONE)
            continue;
        if (copy->stream != stream)
            add_stream(deferred->streams, n_streams, copy->stream);
        if (copy->state == COPY_DEFERRED)
            deferred->batch[n_moves++] =
                (pl_move){.to = memory + self->plan->slots[i].offset_bytes,
                          .from = copy->data,
                          .dtype = self->params[i].dtype,
                          .n_elems = self->params[i].n_elems};
    }
    return n_moves;
}

pl_status pli_reducer_pack(pl_reducer *self, size_t b, pl_stream *stream)
{
    pl_status st = PL_OK;
    deferred_copies *deferred = &self->deferred;
    pl_backend *backend = self->backend;
    size_t n_streams = 0;
    const size_t n_moves = list_moves(self, b, stream, &n_streams);
    for (size_t k = 0; k < n_streams; k++)
        PL_TRY(stream_wait(self, stream, deferred->streams[k]));
    stream_wait_pending(self, stream);
    if (n_moves > 0)
        PL_TRY(backend->ops->copy(backend, deferred->batch, n_moves, stream));
    PL_TRY(backend->ops->event_record(backend, deferred->ready[b], stream));
    /* Freed gradients' memory may be reused on the streams that made them. */
    for (size_t k = 0; k < n_streams; k++)
        PL_TRY(backend->ops->event_wait(backend, deferred->ready[b],
                                        deferred->streams[k]));
done:
    return st;
}

pl_status pli_reducer_copy_late(pl_reducer *self, size_t param, const void *data)
{
    pl_status st = PL_OK;
    const pl_move move = slot_move(self, param, data);
    const deferred_copy *copy =
        pli_reducer_defers(&self->deferred) ? &self->deferred.copies[param] : NULL;
    pl_stream *made_on =
        copy != NULL && copy->state != COPY_NONE ? copy->stream : self->stream;
    PL_TRY(stream_wait(self, self->stream, made_on));
    PL_TRY(self->backend->ops->copy(self->backend, &move, 1, self->stream));
    PL_TRY(stream_wait(self, made_on, self->stream));
done:
    return st;
}
