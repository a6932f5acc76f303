/* gpu_inflight.h - which of a world's device operations the device has not done.
 *
 * Behind each operation an event is recorded, one of a ring of them.  Operations of one
 * stream are done in order, so the last event that is done tells of all before.  What
 * is captured into a graph is left out: its events may not be queried.
 *
 * The rank's thread records; the watchdog's queries.  An event that is being recorded
 * is not queried for that long, so a driver that makes the recorder wait keeps nobody
 * else.
 */
#ifndef PLI_GPU_INFLIGHT_H
#define PLI_GPU_INFLIGHT_H

#include <pthread.h>

#include "backend/backend.h"

/* Counts device operations from 1. */
typedef struct pli_inflight_op {
    uint64_t n;
    uint64_t step;
    pl_op op;
    int64_t since_ns; /* when it became the oldest that is not done */
} pli_inflight_op;

typedef struct pli_inflight {
    pl_backend *backend; /* borrowed */
    pthread_mutex_t lock;
    size_t n_slots;       /* a power of two */
    pl_event **events;    /* a ring; slot n % n_slots is of operation n */
    pli_inflight_op *ops; /* ...; n == 0: its event is being recorded */
    uint64_t n_recorded;
    uint64_t n_done;
    int64_t since_ns; /* when n_done grew, or the first after a rest was recorded */
} pli_inflight;

/* For up to n_ops operations a step. */
pl_status pli_inflight_init(pli_inflight *self, pl_backend *backend,
                            size_t n_ops) PL_MUST_USE;
void pli_inflight_fini(pli_inflight *self);

/* Records that op was enqueued on `stream`; *out: its event, till n_ops later. */
pl_status pli_inflight_record(pli_inflight *self, const pl_op *op, uint64_t step,
                              pl_stream *stream, pl_event **out) PL_MUST_USE;

/* The oldest that the device has not done; *out has n == 0 where it has done all. */
pl_status pli_inflight_oldest(pli_inflight *self, pli_inflight_op *out) PL_MUST_USE;

/* All that was recorded is done, or never will be. */
void pli_inflight_forget(pli_inflight *self);

#endif
