/* device_follow.h - which of a world's device operations the device has not done.
 *
 * Behind each operation an event is recorded, one of a ring of them.  Operations of one
 * stream are done in order, so the last event that is done tells of all before.  What
 * is captured into a graph is not followed: its events may not be asked.
 *
 * The rank's thread notes; the watchdog's asks.  An event that is being recorded is not
 * asked for that long, so a driver that makes the recorder wait keeps nobody else.
 */
#ifndef PLI_DEVICE_FOLLOW_H
#define PLI_DEVICE_FOLLOW_H

#include <pthread.h>

#include "../backend/backend.h"

/* Counts device operations from 1. */
typedef struct pli_followed {
    uint64_t n;
    uint64_t step;
    pl_op op;
    int64_t since_ns; /* when it became the oldest that is not done */
} pli_followed;

typedef struct pli_follow {
    pl_backend *backend; /* borrowed */
    pthread_mutex_t lock;
    size_t n_slots;    /* a power of two */
    pl_event **events; /* a ring; slot n % n_slots is of operation n */
    pli_followed *ops; /* ...; n == 0: its event is being recorded */
    uint64_t n_noted;
    uint64_t n_done;
    int64_t since_ns; /* when n_done grew, or the first after a rest was noted */
} pli_follow;

/* For up to n_ops operations a step. */
pl_status pli_follow_init(pli_follow *it, pl_backend *backend,
                          size_t n_ops) PL_MUST_USE;
void pli_follow_fini(pli_follow *it);

/* Records that op was enqueued on `stream`; *out: its event, till n_ops later. */
pl_status pli_follow_note(pli_follow *it, const pl_op *op, uint64_t step,
                          pl_stream *stream, pl_event **out) PL_MUST_USE;

/* The oldest that the device has not done; *out has n == 0 where it has done all. */
pl_status pli_follow_oldest(pli_follow *it, pli_followed *out) PL_MUST_USE;

/* All that was noted is done, or never will be. */
void pli_follow_forget(pli_follow *it);

#endif
