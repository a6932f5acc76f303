/* backend.h - backend/: memory of one kind, and arithmetic on it, behind one table.
 *
 *     comm, nccl, reducer, python
 *       \--> pl_backend: cpu (cpu_sum, cpu_scale), cuda (driver, kernels)
 *              \--> core
 *
 * The reducer moves gradients only through this table.  A move names many tensors
 * at once, so that a device can do a bucket in one launch, and the stream that
 * produced them; events order streams and cost nothing on the CPU, where a stream
 * is NULL and everything has happened when a call returns.
 */
#ifndef PLI_BACKEND_H
#define PLI_BACKEND_H

#include "core/backoff.h"

/* A CUstream behind an opaque name.  NULL: the CPU, or a GPU's legacy default stream.
 */
typedef struct pl_stream pl_stream;
typedef struct pl_event pl_event;
typedef struct pl_backend pl_backend;

/* One tensor's worth of elements; both sides dense, in the same layout. */
typedef struct pl_move {
    void *to;
    const void *from; /* NULL: zeros */
    pl_dtype dtype;
    size_t n_elems;
} pl_move;

/* Several ranks' ranges, one after another in memory, to be reduced to one: in rank
 * order, 16-bit floats in float32, rounded once (as cpu_sum.h). */
typedef struct pl_rank_ranges {
    void *to; /* may be one of the ranges */
    const void *from;
    size_t stride_bytes; /* from a rank's range to the next rank's */
    int n_ranks;
    pl_dtype dtype;         /* floating point or complex */
    pl_reduction reduction; /* PL_SUM or PL_MEAN */
    size_t n_elems;
} pl_rank_ranges;

/* When a move is best made: as it comes, while it is in cache, or with all of its
 * bucket, in one launch. */
typedef enum pl_batching { PL_MOVE_AT_ONCE, PL_MOVE_BY_BUCKET } pl_batching;

typedef struct pl_backend_ops {
    const char *name;
    pl_batching batching;
    /* Memory of this kind, aligned to a cache line; contents undefined.  Both may wait
     * for the device: not for a training step's steady state. */
    pl_status (*alloc)(pl_backend *backend, size_t n_bytes, void **out);
    void (*free)(pl_backend *backend, void *memory);
    /* to = from, and to = to + from, on `stream`.  Moves to the very same place are
     * made in the order of `moves`; apart from that they may run side by side, so none
     * may touch what another one of the call writes.  The same goes for scale. */
    pl_status (*copy)(pl_backend *backend, const pl_move *moves, size_t n_moves,
                      pl_stream *stream);
    pl_status (*add)(pl_backend *backend, const pl_move *moves, size_t n_moves,
                     pl_stream *stream);
    /* to = to * numerator / denominator, in float64, rounded once; `from` is not read
     */
    pl_status (*scale)(pl_backend *backend, const pl_move *moves, size_t n_moves,
                       int numerator, int denominator, pl_stream *stream);
    pl_status (*sum)(pl_backend *backend, const pl_rank_ranges *ranges,
                     pl_stream *stream);
    pl_status (*event_create)(pl_backend *backend, pl_event **out);
    pl_status (*event_record)(pl_backend *backend, pl_event *event, pl_stream *stream);
    pl_status (*event_wait)(pl_backend *backend, pl_event *event, pl_stream *stream);
    /* Whether what came before the last record is done; never waits. */
    pl_status (*event_is_done)(pl_backend *backend, pl_event *event, int *out);
    void (*event_destroy)(pl_backend *backend, pl_event *event);
    /* Waits on the host until all that `stream` holds is done. */
    pl_status (*synchronize)(pl_backend *backend, pl_stream *stream);
    void (*destroy)(pl_backend *backend);
} pl_backend_ops;

struct pl_backend {
    const pl_backend_ops *ops;
};

/* Waits, on the host, until the event's last record is done. */
pl_status pli_backend_await(pl_backend *backend, pl_event *event, pli_backoff *backoff,
                            const char *what) PL_MUST_USE;

/* PL_EINVAL for what neither kind sums up. */
pl_status pli_backend_check_ranges(const pl_rank_ranges *ranges) PL_MUST_USE;

/* Host memory, moved by the calling thread.  *out: the caller destroys it. */
pl_status pli_cpu_backend_create(pl_backend **out) PL_MUST_USE;

static inline void pli_backend_destroy(pl_backend *backend)
{
    if (backend != NULL)
        backend->ops->destroy(backend);
}

#endif
