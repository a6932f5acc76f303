/* reducer_deliver.c - takes gradients, and posts buckets.
 *
 * If the backend copies at once, each gradient is copied as it comes; one that fills a
 * bucket alone is summed by the ranks while it is still being copied.
 *
 * If a launch costs more than a copy, a gradient's copy is *deferred*: one launch packs
 * the bucket when its turn comes, on the stream P of the caller that posts it.  A
 * stream F that made some of the gradients is ordered before and after that:
 *
 *     F     gradient -----\                        /-- its memory is used again
 *     P     -------------- waits, packs, ready[b] --------------------------
 *     world                                       \-- all-reduce
 *
 * A wait holds for the latest record, so one event is enough for all pairs of streams.
 * From a plan's second step on, nothing here allocates; nothing ever waits.
 */
#include <string.h>

#include "core/alloc.h"
#include "reducer_state.h"

/* ---- deferred copies ------------------------------------------------------------ */

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
    if (!pli_reducer_defers(self))
        return;
    destroy_events(self, deferred->ready, deferred->n_ready);
    if (deferred->any_event != NULL)
        destroy_events(self, &deferred->any_event, 1);
    if (deferred->side_event != NULL)
        destroy_events(self, &deferred->side_event, 1);
    pli_free(deferred->copies);
    pli_free(deferred->batch);
    pli_free(deferred->streams);
    pli_free(deferred->ready);
}

pl_status pli_deferred_copies_make_room(pl_reducer *self, size_t n_buckets)
{
    pl_status st = PL_OK;
    deferred_copies *deferred = &self->deferred;
    while (pli_reducer_defers(self) && deferred->n_ready < n_buckets) {
        PL_TRY(self->backend->ops->event_create(self->backend,
                                                &deferred->ready[deferred->n_ready]));
        deferred->n_ready++;
    }
done:
    return st;
}

void pli_deferred_copies_begin(pl_reducer *self)
{
    if (pli_reducer_defers(self))
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
    pl_event *event = self->deferred.side_event; /* NULL on the CPU */
    if (event != NULL)
        PL_TRY(self->backend->ops->event_record(self->backend, event, stream));
    *out = event;
done:
    return st;
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
    if (!pli_reducer_defers(self) || self->phase != REDUCER_FILLING ||
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

/* Makes all deferred copies of a bucket on `stream`, and records ready[bucket]. */
static pl_status pack(pl_reducer *self, size_t b, pl_stream *stream)
{
    pl_status st = PL_OK;
    deferred_copies *deferred = &self->deferred;
    pl_backend *backend = self->backend;
    size_t n_streams = 0;
    const size_t n_moves = list_moves(self, b, stream, &n_streams);
    for (size_t k = 0; k < n_streams; k++)
        PL_TRY(stream_wait(self, stream, deferred->streams[k]));
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
        pli_reducer_defers(self) ? &self->deferred.copies[param] : NULL;
    pl_stream *made_on =
        copy != NULL && copy->state != COPY_NONE ? copy->stream : self->stream;
    PL_TRY(stream_wait(self, self->stream, made_on));
    PL_TRY(self->backend->ops->copy(self->backend, &move, 1, self->stream));
    PL_TRY(stream_wait(self, made_on, self->stream));
done:
    return st;
}

/* ---- posting -------------------------------------------------------------------- */

/* Issues the next operation of a bucket: chunk_bytes of it, or what remains. */
static pl_status issue_chunk(pl_reducer *self, size_t b)
{
    pl_status st = PL_OK;
    const pl_bucket_plan *bucket = &self->plan->buckets[b];
    const size_t elem_bytes = pl_dtype_bytes(bucket->dtype);
    const size_t n_left = bucket->n_elems - self->buckets[b].n_issued;
    const size_t n_most = self->comm->chunk_bytes / elem_bytes;
    const pl_op op = {
        .kind = PL_ALL_REDUCE,
        .reduction = PL_MEAN,
        .dtype = bucket->dtype,
        .offset_bytes = self->at.buckets + bucket->offset_bytes +
                        self->buckets[b].n_issued * elem_bytes,
        .n_elems = n_left < n_most ? n_left : n_most,
        .is_followed = 1, /* at the latest by the operations of close */
        .bucket = (unsigned)b + 1,
    };
    const pli_order order = {.ready = pli_reducer_defers(self) ? self->deferred.ready[b]
                                                               : NULL};
    PL_TRY(pli_comm_issue_ordered(self->comm, &op, &order, &self->last_ticket));
    self->buckets[b].n_issued += op.n_elems;
done:
    return st;
}

pl_status pli_reducer_post_ready(pl_reducer *self, pl_stream *stream)
{
    pl_status st = PL_OK;
    while (self->n_posted < self->plan->n_buckets &&
           self->buckets[self->n_posted].phase == BUCKET_READY) {
        const size_t b = self->n_posted;
        if (pli_reducer_defers(self))
            PL_TRY(pack(self, b, stream));
        if (self->comm_hook.post != NULL)
            PL_TRY(self->comm_hook.post(self->comm_hook.context, b));
        else
            while (self->buckets[b].n_issued < self->plan->buckets[b].n_elems)
                PL_TRY(issue_chunk(self, b));
        self->buckets[b].phase = BUCKET_POSTED;
        self->n_posted++;
    }
done:
    return st;
}

/* ---- arriving ------------------------------------------------------------------- */

static pl_status move_in(pl_reducer *self, size_t param, const void *data,
                         pl_write_mode mode, pl_stream *stream)
{
    const pl_move move = slot_move(self, param, data);
    switch (mode) {
    case PL_REPLACE:
        return self->backend->ops->copy(self->backend, &move, 1, stream);
    case PL_ADD:
        return self->backend->ops->add(self->backend, &move, 1, stream);
    case PL_IN_PLACE:
        break;
    }
    return PL_OK;
}

/* Whether a large gradient can be summed while it is still being copied: it is alone in
 * its bucket, whose turn it is, and no further gradient is expected for it. */
static int can_stream(const pl_reducer *self, size_t param, const void *data,
                      pl_write_mode mode)
{
    const size_t b = self->plan->slots[param].bucket;
    const slot_state *slot = &self->slots[param];
    return self->comm_hook.post == NULL && mode == PL_REPLACE && data != NULL &&
           self->n_posted == b && self->plan->buckets[b].n_params == 1 &&
           self->buckets[b].n_pending == 1 &&
           self->buckets[b].phase == BUCKET_FILLING &&
           slot->n_ready + 1 == slot->n_expected;
}

/* Copies and issues chunk by chunk: each is summed while it is in cache. */
static pl_status stream_in(pl_reducer *self, size_t param, const void *data,
                           pl_stream *stream)
{
    pl_status st = PL_OK;
    const pl_param *tensor = &self->params[param];
    const size_t b = self->plan->slots[param].bucket;
    const size_t elem_bytes = pl_dtype_bytes(tensor->dtype);
    const size_t n_most = self->comm->chunk_bytes / elem_bytes;
    pli_reducer_record_ready(self, b);
    for (size_t first = 0; first < tensor->n_elems; first += n_most) {
        const size_t n_left = tensor->n_elems - first;
        const pl_move move = {
            .to = slot_memory(self, param) + first * elem_bytes,
            .from = (const char *)data + first * elem_bytes,
            .dtype = tensor->dtype,
            .n_elems = n_left < n_most ? n_left : n_most,
        };
        PL_TRY(self->backend->ops->copy(self->backend, &move, 1, stream));
        PL_TRY(issue_chunk(self, b));
        PL_TRY(pl_comm_progress(self->comm));
    }
done:
    return st;
}

/* Counts a gradient; the last expected one makes its bucket ready. */
static pl_status count_ready(pl_reducer *self, size_t param, pl_stream *stream)
{
    pl_status st = PL_OK;
    slot_state *slot = &self->slots[param];
    const size_t b = self->plan->slots[param].bucket;
    bucket_state *bucket = &self->buckets[b];
    slot->ready_at = self->n_ready++;
    self->n_ready_params += slot->n_ready == 0;
    if (slot->n_ready < UINT16_MAX)
        slot->n_ready++;
    if (slot->n_ready != slot->n_expected)
        goto done;
    if (bucket->phase == BUCKET_FILLING && --bucket->n_pending == 0) {
        pli_reducer_bucket_is_ready(self, b);
        PL_TRY(pli_reducer_post_ready(self, stream));
    }
done:
    return st;
}

pl_status pl_reducer_mark_ready(pl_reducer *self, size_t param, const void *data,
                                pl_write_mode mode, pl_stream *stream,
                                pl_ready_result *out)
{
    pl_status st = PL_OK;
    pl_ready_result result = PL_COPIED;
    const bucket_state *bucket = &self->buckets[self->plan->slots[param].bucket];
    if (self->phase != REDUCER_FILLING)
        PL_FAIL(PL_ESTATE, "a gradient arrives outside a step");
    /* A parameter without elements has no data in the bucket, so it is never late. */
    if (bucket->phase == BUCKET_POSTED && self->params[param].n_elems > 0) {
        late_of(self)[param] = 1;
        result = PL_LATE;
        if (pli_reducer_defers(self))
            self->deferred.copies[param].stream = stream;
    } else if (pli_reducer_defers(self)) {
        PL_TRY(pli_reducer_defer(self, param, data, mode, stream, &result));
    } else if (can_stream(self, param, data, mode)) {
        PL_TRY(stream_in(self, param, data, stream));
    } else {
        PL_TRY(move_in(self, param, data, mode, stream));
        /* A READY bucket may wait for its turn: the slot may still take more. */
    }
    if (data != NULL)
        used_of(self)[param] = USED_DENSE;
    PL_TRY(count_ready(self, param, stream));
    PL_TRY(pl_comm_progress(self->comm));
    if (result == PL_DEFERRED && bucket->phase == BUCKET_POSTED)
        result = PL_COPIED;
    *out = result;
done:
    return st;
}
