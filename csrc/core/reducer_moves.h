/* reducer_moves.h - moves that are put off until their bucket is posted.
 *
 * Where a launch costs more than a copy, what is delivered is only *noted*, and one
 * launch packs the bucket when its turn has come, on the stream P of whoever posts it.
 * A stream F that has made some of its gradients is ordered both ways:
 *
 *     F     gradient -----\                        /-- its memory is used again
 *     P     -------------- waits, packs, ready[b] --------------------------
 *     world                                       \-- all-reduce
 *
 * A wait holds for the record before it, so one event is enough for all pairs of
 * streams.  Nothing here allocates from a plan's second step on, and nothing waits.
 */
#ifndef PLI_REDUCER_MOVES_H
#define PLI_REDUCER_MOVES_H

#include "reducer.h"

typedef enum note_kind {
    NOTE_NONE,    /* nothing has come in this step */
    NOTE_HELD,    /* it is at `data`; NULL: zeros */
    NOTE_IN_SLOT, /* `stream` has put it into the slot */
} note_kind;

/* What has come for a parameter. */
typedef struct slot_note {
    const void *data;
    pl_stream *stream;
    note_kind kind;
} slot_note;

typedef struct reducer_moves {
    slot_note *notes;    /* by parameter; NULL: nothing is put off */
    pl_move *moves;      /* of one launch: room for all parameters */
    pl_stream **streams; /* ... */
    pl_event **ready;    /* by bucket */
    size_t n_ready;
    pl_event *between; /* for any two streams */
    pl_event *aside;   /* behind what is neither a bucket's nor a foreign stream's */
    /* Behind what a step that failed may have left on its streams. */
    pl_event **stale;
    size_t n_stale;
    size_t n_stale_made;
} reducer_moves;

static inline int reducer_defers(const reducer_moves *moves)
{
    return moves->notes != NULL;
}

pl_status reducer_moves_init(pl_reducer *self) PL_MUST_USE;
void reducer_moves_fini(pl_reducer *self);

/* Has events for that many buckets. */
pl_status reducer_moves_make_room(pl_reducer *self, size_t n_buckets) PL_MUST_USE;

/* A step begins: nothing is noted. */
void reducer_moves_begin(pl_reducer *self);

/* Notes what is delivered, while its bucket is not posted; what is to be added is added
 * at once. */
pl_status reducer_note(pl_reducer *self, size_t param, const void *data,
                       pl_delivery delivery, pl_stream *stream,
                       pl_verdict *out) PL_MUST_USE;

/* Moves all that is noted of a bucket, on `stream`; ready[bucket] is behind it. */
pl_status reducer_pack(pl_reducer *self, size_t bucket, pl_stream *stream) PL_MUST_USE;

/* Moves late data into the slot, behind the stream that has made it. */
pl_status reducer_move_late(pl_reducer *self, size_t param,
                            const void *data) PL_MUST_USE;

/* The event that says what `stream` has put into the arena until now. */
pl_status reducer_record_aside(pl_reducer *self, pl_stream *stream,
                               pl_event **out) PL_MUST_USE;

/* The step fails: what it has enqueued will come before what the next one does. */
void reducer_moves_abandon(pl_reducer *self);

#endif
