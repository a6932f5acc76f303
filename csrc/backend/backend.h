/* backend.h - the table behind which a kind of memory stands.
 *
 * The reducer moves gradients only through this table.  A move names many tensors
 * at once, so that a device can do a bucket in one launch, and the stream that
 * produced them; events order streams and cost nothing on the CPU, where a stream
 * is NULL and everything has happened when a call returns.
 */
#ifndef PLI_BACKEND_H
#define PLI_BACKEND_H

#include "../core/status.h"

typedef struct pl_stream pl_stream; /* a CUstream behind an opaque name; NULL: CPU */
typedef struct pl_event pl_event;
typedef struct pl_backend pl_backend;

/* One tensor's worth of elements; both sides dense, in the same layout. */
typedef struct pl_move {
    void *to;
    const void *from; /* NULL: zeros */
    pl_dtype dtype;
    size_t n_elems;
} pl_move;

typedef struct pl_backend_ops {
    const char *name;
    /* to = from, and to = to + from, in the order of `moves` on `stream` */
    pl_status (*copy)(pl_backend *backend, const pl_move *moves, size_t n_moves,
                      pl_stream *stream);
    pl_status (*add)(pl_backend *backend, const pl_move *moves, size_t n_moves,
                     pl_stream *stream);
    /* to = to * numerator / denominator, in float64, rounded once; `from` is not read
     */
    pl_status (*scale)(pl_backend *backend, const pl_move *moves, size_t n_moves,
                       int numerator, int denominator, pl_stream *stream);
    pl_status (*event_create)(pl_backend *backend, pl_event **out);
    pl_status (*event_record)(pl_backend *backend, pl_event *event, pl_stream *stream);
    pl_status (*event_wait)(pl_backend *backend, pl_event *event, pl_stream *stream);
    void (*event_destroy)(pl_backend *backend, pl_event *event);
    void (*destroy)(pl_backend *backend);
} pl_backend_ops;

struct pl_backend {
    const pl_backend_ops *ops;
};

/* Host memory, moved by the calling thread.  *out: the caller destroys it. */
pl_status pli_cpu_backend_create(pl_backend **out) PL_MUST_USE;

static inline void pli_backend_destroy(pl_backend *backend)
{
    if (backend != NULL)
        backend->ops->destroy(backend);
}

#endif
