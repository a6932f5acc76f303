/* cuda_peers.h - copies between the memories of two devices of one process. */
#ifndef PLI_CUDA_PEERS_H
#define PLI_CUDA_PEERS_H

#include "cuda.h"

/* Memory of one device. */
typedef struct pli_cuda_place {
    pl_backend *backend;
    void *memory;
} pli_cuda_place;

/* Enqueues a copy on a stream of `by`; both places may be on one device. */
pl_status pli_cuda_copy_between(pli_cuda_place to, pli_cuda_place from, size_t n_bytes,
                                pl_backend *by, pl_stream *stream) PL_MUST_USE;

/* Enables peer access in both directions.  If the machine has none, copies between the
 * two devices go through host memory.  *can_read: kernels of `other` can read `one`'s
 * memory, if that is shared (pli_cuda_are_shared()). */
pl_status pli_cuda_join_peers(pl_backend *one, pl_backend *other,
                              int *can_read) PL_MUST_USE;

/* *out: kernels of devices with peer access may read each move's `from`.  They may not
 * if it is mapped for one device only, as torch's expandable segments are. */
pl_status pli_cuda_are_shared(pl_backend *backend, const pl_move *moves, size_t n_moves,
                              int *out) PL_MUST_USE;

#endif
