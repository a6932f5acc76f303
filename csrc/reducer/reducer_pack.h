/* reducer_pack.h - defers copies until their bucket is posted.
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
#ifndef PLI_REDUCER_PACK_H
#define PLI_REDUCER_PACK_H

#include "reducer.h"

typedef enum copy_state {
    COPY_NONE,     /* no gradient in this step */
    COPY_DEFERRED, /* it is at `data`; NULL: zeros */
    COPY_IN_SLOT,  /* `stream` has put it into the slot */
} copy_state;

/* A parameter's gradient in this step. */
typedef struct deferred_copy {
    const void *data;
    pl_stream *stream;
    copy_state state;
} deferred_copy;

typedef struct deferred_copies {
    deferred_copy *copies; /* by parameter; NULL: copies are not deferred */
    pl_move *batch;        /* of one launch: room for all parameters */
    pl_stream **streams;   /* ... */
    pl_event **ready;      /* by bucket */
    size_t n_ready;
    pl_event *any_event;  /* for any two streams */
    pl_event *side_event; /* for what is in no bucket */
    /* After work that a failed step may have left pending on its streams. */
    pl_event **pending;
    size_t n_pending;
    size_t n_pending_made;
} deferred_copies;

static inline int pli_reducer_defers(const deferred_copies *deferred)
{
    return deferred->copies != NULL;
}

pl_status pli_deferred_copies_init(pl_reducer *self) PL_MUST_USE;
void pli_deferred_copies_fini(pl_reducer *self);

/* Makes events for that many buckets. */
pl_status pli_deferred_copies_make_room(pl_reducer *self, size_t n_buckets) PL_MUST_USE;

/* A step begins: no copy is deferred. */
void pli_deferred_copies_begin(pl_reducer *self);

/* Defers the copy of a gradient whose bucket is not posted; PL_ADD adds at once. */
pl_status pli_reducer_defer(pl_reducer *self, size_t param, const void *data,
                            pl_write_mode mode, pl_stream *stream,
                            pl_ready_result *out) PL_MUST_USE;

/* Makes all deferred copies of a bucket on `stream`, and records ready[bucket]. */
pl_status pli_reducer_pack(pl_reducer *self, size_t bucket,
                           pl_stream *stream) PL_MUST_USE;

/* Copies late data into the slot, after the stream that made it. */
pl_status pli_reducer_copy_late(pl_reducer *self, size_t param,
                                const void *data) PL_MUST_USE;

/* *out: an event after all that `stream` has put into the arena, or NULL on the CPU. */
pl_status pli_reducer_record_side(pl_reducer *self, pl_stream *stream,
                                  pl_event **out) PL_MUST_USE;

/* The step fails: the next one will wait for the work that it has enqueued. */
void pli_deferred_copies_abandon(pl_reducer *self);

#endif
