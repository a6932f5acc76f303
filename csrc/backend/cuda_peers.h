/* cuda_peers.h - copies between the memories of two devices of one process. */
#ifndef PLI_CUDA_PEERS_H
#define PLI_CUDA_PEERS_H

#include "cuda.h"

/* Memory of one device. */
typedef struct pli_cuda_place {
    pl_backend *backend;
    void *memory;
} pli_cuda_place;

/* Enqueues a copy on a stream of `by`; the two may be of one device. */
pl_status pli_cuda_copy_between(pli_cuda_place to, pli_cuda_place from, size_t n_bytes,
                                pl_backend *by, pl_stream *stream) PL_MUST_USE;

/* Has copies between two devices go straight from one to the other where the machine
 * can; else they go by way of the host's memory.  *can_read: the other's kernels can
 * read memory of the one, where it is shared. */
pl_status pli_cuda_join_peers(pl_backend *one, pl_backend *other,
                              int *can_read) PL_MUST_USE;

/* *out: devices that have access may read, by kernels, what is moved from: not what is
 * mapped for one device alone, as by torch's expandable segments. */
pl_status pli_cuda_are_shared(pl_backend *backend, const pl_move *moves, size_t n_moves,
                              int *out) PL_MUST_USE;

#endif
