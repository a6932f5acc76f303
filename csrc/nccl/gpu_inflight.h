/* gpu_inflight.h - tracks which device operations of a world are not done.
 *
 * An event of a ring is recorded after each operation.  A stream does its operations in
 * order, so a done event shows that all before it are done.  Captured operations are
 * left out: their events may not be queried.
 *
 * The rank's thread records; the watchdog's queries.  No thread queries an event while
 * it is recorded, so a driver that blocks the recorder blocks no other thread.
 */
#ifndef PLI_GPU_INFLIGHT_H
#define PLI_GPU_INFLIGHT_H

#include <pthread.h>

#include "backend/backend.h"
#include "core/clock.h"

/* A device operation; n counts from 1. */
typedef struct pli_inflight_op {
    uint64_t n;
    uint64_t step;
    pl_op op;
    int64_t age_ns; /* since it became the oldest that is not done */
} pli_inflight_op;

typedef struct pli_inflight {
    pl_backend *backend; /* borrowed */
    pthread_mutex_t lock;
    size_t n_slots;       /* a power of two */
    pl_event **events;    /* a ring; operation n has slot n % n_slots */
    pli_inflight_op *ops; /* ...; n == 0: its event is being recorded */
    uint64_t n_recorded;
    uint64_t n_done;
    pli_stopwatch age; /* since n_done grew, or a record ended a time without work */
} pli_inflight;

/* For up to n_ops operations a step. */
pl_status pli_inflight_init(pli_inflight *self, pl_backend *backend,
                            size_t n_ops) PL_MUST_USE;
void pli_inflight_fini(pli_inflight *self);

/* Records that op was enqueued on `stream`; *out: its event, till n_ops later. */
pl_status pli_inflight_record(pli_inflight *self, const pl_op *op, uint64_t step,
                              pl_stream *stream, pl_event **out) PL_MUST_USE;

/* The oldest operation that the device has not done; out->n is 0 if it has done all. */
pl_status pli_inflight_oldest(pli_inflight *self, pli_inflight_op *out) PL_MUST_USE;

#endif
