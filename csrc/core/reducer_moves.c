/* reducer_moves.c - noting, packing, and the order of streams round both. */
#include "reducer_moves.h"

#include <string.h>

#include "alloc.h"
#include "reducer_state.h"

/* ---- life ----------------------------------------------------------------------- */

pl_status reducer_moves_init(pl_reducer *self)
{
    pl_status st = PL_OK;
    reducer_moves *it = &self->moves;
    const size_t n = self->spec.n_params;
    if (self->backend->ops->batching == PL_MOVE_AT_ONCE)
        goto done;
    PL_TRY(pli_calloc(n, sizeof *it->notes, "what is delivered", &it->notes));
    PL_TRY(pli_calloc(n, sizeof *it->moves, "a bucket's moves", &it->moves));
    PL_TRY(pli_calloc(n, sizeof(pl_stream *), "a bucket's streams", &it->streams));
    PL_TRY(pli_calloc(n, sizeof(pl_event *), "buckets' events", &it->ready));
    PL_TRY(pli_calloc(n, sizeof(pl_event *), "a failed step's events", &it->stale));
    PL_TRY(self->backend->ops->event_create(self->backend, &it->between));
    PL_TRY(self->backend->ops->event_create(self->backend, &it->aside));
done:
    return st;
}

static void destroy_events(pl_reducer *self, pl_event *const *events, size_t n)
{
    for (size_t k = 0; k < n; k++)
        self->backend->ops->event_destroy(self->backend, events[k]);
}

void reducer_moves_fini(pl_reducer *self)
{
    reducer_moves *it = &self->moves;
    if (!reducer_defers(it))
        return;
    destroy_events(self, it->ready, it->n_ready);
    destroy_events(self, it->stale, it->n_stale_made);
    if (it->between != NULL)
        destroy_events(self, &it->between, 1);
    if (it->aside != NULL)
        destroy_events(self, &it->aside, 1);
    pli_free(it->notes);
    pli_free(it->moves);
    pli_free(it->streams);
    pli_free(it->ready);
    pli_free(it->stale);
}

pl_status reducer_moves_make_room(pl_reducer *self, size_t n_buckets)
{
    pl_status st = PL_OK;
    reducer_moves *it = &self->moves;
    while (reducer_defers(it) && it->n_ready < n_buckets) {
        PL_TRY(
            self->backend->ops->event_create(self->backend, &it->ready[it->n_ready]));
        it->n_ready++;
    }
done:
    return st;
}

void reducer_moves_begin(pl_reducer *self)
{
    if (reducer_defers(&self->moves))
        memset(self->moves.notes, 0, self->spec.n_params * sizeof *self->moves.notes);
}

/* ---- the order of streams ----------------------------------------------------------
 */

/* What `behind` does from now on comes behind what `stream` holds now. */
static pl_status put_behind(pl_reducer *self, pl_stream *behind, pl_stream *stream)
{
    pl_status st = PL_OK;
    pl_backend *backend = self->backend;
    if (behind == stream)
        goto done;
    PL_TRY(backend->ops->event_record(backend, self->moves.between, stream));
    PL_TRY(backend->ops->event_wait(backend, self->moves.between, behind));
done:
    return st;
}

/* Before `stream` writes to a slot: what a failed step has left may write there too.
 * Where that was captured, and the graph thrown away, there is nothing to wait for, and
 * the event says so by an error. */
static void put_behind_stale(pl_reducer *self, pl_stream *stream)
{
    for (size_t k = 0; k < self->moves.n_stale; k++)
        (void)self->backend->ops->event_wait(self->backend, self->moves.stale[k],
                                             stream);
}

static void add_stream(pl_stream **streams, size_t *n_streams, pl_stream *stream)
{
    for (size_t k = 0; k < *n_streams; k++)
        if (streams[k] == stream)
            return;
    streams[(*n_streams)++] = stream;
}

pl_status reducer_record_aside(pl_reducer *self, pl_stream *stream, pl_event **out)
{
    pl_status st = PL_OK;
    if (!reducer_defers(&self->moves)) {
        *out = NULL;
        goto done;
    }
    PL_TRY(self->backend->ops->event_record(self->backend, self->moves.aside, stream));
    *out = self->moves.aside;
done:
    return st;
}

void reducer_moves_abandon(pl_reducer *self)
{
    reducer_moves *it = &self->moves;
    const pl_backend_ops *ops = self->backend->ops;
    size_t n_streams = 0;
    if (!reducer_defers(it))
        return;
    for (size_t i = 0; i < self->spec.n_params; i++)
        if (it->notes[i].kind != NOTE_NONE)
            add_stream(it->streams, &n_streams, it->notes[i].stream);
    for (size_t k = 0; k < n_streams; k++)
        put_behind_stale(self, it->streams[k]); /* what was stale stays so */
    for (size_t k = 0; k < n_streams; k++) {
        if (k == it->n_stale_made) {
            if (ops->event_create(self->backend, &it->stale[k]) != PL_OK)
                break;
            it->n_stale_made++;
        }
        (void)ops->event_record(self->backend, it->stale[k], it->streams[k]);
    }
    if (n_streams > 0)
        it->n_stale = n_streams < it->n_stale_made ? n_streams : it->n_stale_made;
}

/* ---- what is delivered -------------------------------------------------------------
 */

/* Copies what is held of a parameter, on the stream that has made it. */
static pl_status flush(pl_reducer *self, size_t param)
{
    pl_status st = PL_OK;
    slot_note *note = &self->moves.notes[param];
    if (note->kind != NOTE_HELD)
        goto done;
    const pl_move move = slot_move(self, param, note->data);
    put_behind_stale(self, note->stream);
    PL_TRY(self->backend->ops->copy(self->backend, &move, 1, note->stream));
    *note = (slot_note){.stream = note->stream, .kind = NOTE_IN_SLOT};
done:
    return st;
}

/* Adds to the slot, behind whoever has written it. */
static pl_status add_now(pl_reducer *self, size_t param, const void *data,
                         pl_stream *stream)
{
    pl_status st = PL_OK;
    slot_note *note = &self->moves.notes[param];
    const pl_move move = slot_move(self, param, data);
    PL_TRY(flush(self, param));
    if (note->kind == NOTE_IN_SLOT)
        PL_TRY(put_behind(self, stream, note->stream));
    put_behind_stale(self, stream);
    PL_TRY(self->backend->ops->add(self->backend, &move, 1, stream));
    *note = (slot_note){.stream = stream, .kind = NOTE_IN_SLOT};
done:
    return st;
}

pl_status reducer_note(pl_reducer *self, size_t param, const void *data,
                       pl_delivery delivery, pl_stream *stream, pl_verdict *out)
{
    pl_status st = PL_OK;
    slot_note *note = &self->moves.notes[param];
    pl_verdict verdict = PL_TAKEN;
    if (self->params[param].n_elems == 0)
        goto done;
    if (delivery == PL_ADD) {
        if (data != NULL)
            PL_TRY(add_now(self, param, data, stream));
    } else {
        if (note->kind == NOTE_IN_SLOT)
            PL_TRY(put_behind(self, stream, note->stream));
        *note = (slot_note){.data = data, .stream = stream, .kind = NOTE_HELD};
        if (delivery == PL_IN_PLACE)
            note->kind = NOTE_IN_SLOT;
        else if (data != NULL)
            verdict = PL_HELD;
    }
done:
    if (st == PL_OK)
        *out = verdict;
    return st;
}

pl_status pl_reducer_flush(pl_reducer *self, size_t param)
{
    const size_t b = self->plan->slots[param].bucket;
    if (!reducer_defers(&self->moves) || self->phase != REDUCER_FILLING ||
        self->buckets[b].phase == PL_BUCKET_POSTED)
        return PL_OK;
    return flush(self, param);
}

/* ---- packing -----------------------------------------------------------------------
 */

/* Lists the moves of a bucket, and the streams other than `stream` that had a part. */
static size_t list_moves(pl_reducer *self, size_t b, const pl_stream *stream,
                         size_t *n_streams)
{
    reducer_moves *it = &self->moves;
    const pl_bucket_plan *bucket = &self->plan->buckets[b];
    char *memory = pli_comm_memory(self->comm, self->buckets_at);
    size_t n_moves = 0;
    for (size_t m = 0; m < bucket->n_params; m++) {
        const size_t i = bucket->params[m];
        const slot_note *note = &it->notes[i];
        if (note->kind == NOTE_NONE)
            continue;
        if (note->stream != stream)
            add_stream(it->streams, n_streams, note->stream);
        if (note->kind == NOTE_HELD)
            it->moves[n_moves++] =
                (pl_move){.to = memory + self->plan->slots[i].offset_bytes,
                          .from = note->data,
                          .dtype = self->params[i].dtype,
                          .n_elems = self->params[i].n_elems};
    }
    return n_moves;
}

pl_status reducer_pack(pl_reducer *self, size_t b, pl_stream *stream)
{
    pl_status st = PL_OK;
    reducer_moves *it = &self->moves;
    pl_backend *backend = self->backend;
    size_t n_streams = 0;
    const size_t n_moves = list_moves(self, b, stream, &n_streams);
    for (size_t k = 0; k < n_streams; k++)
        PL_TRY(put_behind(self, stream, it->streams[k]));
    put_behind_stale(self, stream);
    if (n_moves > 0)
        PL_TRY(backend->ops->copy(backend, it->moves, n_moves, stream));
    PL_TRY(backend->ops->event_record(backend, it->ready[b], stream));
    /* Their gradients' memory may be used again there once it is freed. */
    for (size_t k = 0; k < n_streams; k++)
        PL_TRY(backend->ops->event_wait(backend, it->ready[b], it->streams[k]));
done:
    return st;
}

pl_status reducer_move_late(pl_reducer *self, size_t param, const void *data)
{
    pl_status st = PL_OK;
    const pl_move move = slot_move(self, param, data);
    const slot_note *note =
        reducer_defers(&self->moves) ? &self->moves.notes[param] : NULL;
    pl_stream *made_on =
        note != NULL && note->kind != NOTE_NONE ? note->stream : self->stream;
    PL_TRY(put_behind(self, self->stream, made_on));
    PL_TRY(self->backend->ops->copy(self->backend, &move, 1, self->stream));
    PL_TRY(put_behind(self, made_on, self->stream));
done:
    return st;
}
