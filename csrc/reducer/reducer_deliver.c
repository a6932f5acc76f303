/* reducer_deliver.c - takes gradients, and posts buckets.
 *
 * If the backend copies at once, each gradient is copied as it comes; one that fills a
 * bucket alone is summed by the ranks while it is still being copied.  If the backend
 * copies by the bucket, the copy is deferred until the bucket's turn (reducer_pack.h).
 */
#include "reducer.h"
#include "reducer_state.h"

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
    const pli_order order = {
        .ready = pli_reducer_defers(&self->deferred) ? self->deferred.ready[b] : NULL};
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
        if (pli_reducer_defers(&self->deferred))
            PL_TRY(pli_reducer_pack(self, b, stream));
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
        if (pli_reducer_defers(&self->deferred))
            self->deferred.copies[param].stream = stream;
    } else if (pli_reducer_defers(&self->deferred)) {
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

int pl_reducer_may_post(const pl_reducer *self, size_t param)
{
    const slot_state *slot = &self->slots[param];
    const size_t b = self->plan->slots[param].bucket;
    const bucket_state *bucket = &self->buckets[b];
    return b == self->n_posted && bucket->phase == BUCKET_FILLING &&
           bucket->n_pending == 1 && slot->n_ready + 1 == slot->n_expected;
}

void pl_reducer_defer_bucket(pl_reducer *self, size_t param)
{
    self->buckets[self->plan->slots[param].bucket].n_pending++;
}
