/* backend.h - backend/: one kind of memory and the arithmetic on it, as one table.
 *
 *     comm, nccl, reducer, python
 *       \--> pl_backend: cpu (cpu_sum), cuda (driver, kernels)
 *              \--> core
 *
 * The reducer moves gradients only through this table.  A call takes many moves, so
 * that a device can do a bucket in one launch, and the stream that produced the
 * tensors.  Events order streams.  On the CPU a stream is NULL, each call has finished
 * its work when it returns, and events cost nothing.
 */
#ifndef PLI_BACKEND_H
#define PLI_BACKEND_H

#include "core/backoff.h"

/* A CUstream as an opaque type.  NULL: the CPU, or a GPU's legacy default stream. */
typedef struct pl_stream pl_stream;
typedef struct pl_event pl_event;
typedef struct pl_backend pl_backend;

/* The elements of one tensor; both sides are dense and have the same layout. */
typedef struct pl_move {
    void *to;
    const void *from; /* NULL: zeros */
    pl_dtype dtype;
    size_t n_elems;
} pl_move;

/* Several ranks' ranges, one after another in memory, to reduce to one in rank order.
 * 16-bit floats are summed in float32 and rounded once, as in cpu_sum.h. */
typedef struct pl_rank_ranges {
    void *to; /* may be one of the ranges */
    const void *from;
    size_t stride_bytes; /* from a rank's range to the next rank's */
    int n_ranks;
    pl_dtype dtype;         /* floating point or complex */
    pl_reduction reduction; /* PL_SUM or PL_MEAN */
    size_t n_elems;
} pl_rank_ranges;

/* When a device moves a gradient best: at once, while it is in cache, or with all
 * others of its bucket, in one launch. */
typedef enum pl_batching { PL_MOVE_AT_ONCE, PL_MOVE_BY_BUCKET } pl_batching;

typedef struct pl_backend_ops {
    const char *name;
    pl_batching batching;
    /* Memory of this kind, aligned to a cache line; contents undefined.  Both may wait
     * for the device, so training steps in steady state call neither. */
    pl_status (*alloc)(pl_backend *backend, size_t n_bytes, void **out);
    void (*free)(pl_backend *backend, void *memory);
    /* to = from, and to = to + from, on `stream`.  Moves with the same `to` run in the
     * order of `moves`; all others may run concurrently, so a move must not touch what
     * another move of the call writes.  The same holds for scale. */
    pl_status (*copy)(pl_backend *backend, const pl_move *moves, size_t n_moves,
                      pl_stream *stream);
    pl_status (*add)(pl_backend *backend, const pl_move *moves, size_t n_moves,
                     pl_stream *stream);
    /* to = to * numerator / denominator, in float64, rounded once; ignores `from` */
    pl_status (*scale)(pl_backend *backend, const pl_move *moves, size_t n_moves,
                       int numerator, int denominator, pl_stream *stream);
    pl_status (*sum)(pl_backend *backend, const pl_rank_ranges *ranges,
                     pl_stream *stream);
    pl_status (*event_create)(pl_backend *backend, pl_event **out);
    pl_status (*event_record)(pl_backend *backend, pl_event *event, pl_stream *stream);
    pl_status (*event_wait)(pl_backend *backend, pl_event *event, pl_stream *stream);
    /* Whether the work before the last record is done; never waits. */
    pl_status (*event_is_done)(pl_backend *backend, pl_event *event, int *out);
    void (*event_destroy)(pl_backend *backend, pl_event *event);
    /* Waits on the host until all work on `stream` is done. */
    pl_status (*synchronize)(pl_backend *backend, pl_stream *stream);
    void (*destroy)(pl_backend *backend);
} pl_backend_ops;

struct pl_backend {
    const pl_backend_ops *ops;
};

/* Waits on the host until the work before the event's last record is done. */
pl_status pli_backend_await(pl_backend *backend, pl_event *event, pli_backoff *backoff,
                            const char *what) PL_MUST_USE;

/* PL_EINVAL for ranges that no backend can sum. */
pl_status pli_backend_check_ranges(const pl_rank_ranges *ranges) PL_MUST_USE;

/* Host memory; the calling thread moves it.  *out: the caller destroys it. */
pl_status pli_cpu_backend_create(pl_backend **out) PL_MUST_USE;

/* move->to = move->to * numerator / denominator, in host memory; floats and complex
 * only.  Computed in float64 and rounded to nearest even, so exact if the ratio is a
 * power of two and the result is a normal number.  For means over fewer ranks than were
 * summed, which are rare: clear rather than fast. */
void pli_cpu_scale(const pl_move *move, int numerator, int denominator);

static inline void pli_backend_destroy(pl_backend *backend)
{
    if (backend != NULL)
        backend->ops->destroy(backend);
}

#endif
