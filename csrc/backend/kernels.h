/* kernels.h - loads the kernels of kernels.cu and launches them.
 *
 * They come from a fatbin inside the extension, where nvcc was there to build it and
 * the driver takes it, else NVRTC compiles the same source, which is inside the
 * extension too.  What a launch works on travels in its parameters, by value: no table
 * in memory that a later launch, or a replay of a captured one, could find overwritten.
 */
#ifndef PLI_KERNELS_H
#define PLI_KERNELS_H

#include "backend.h"
#include "driver.h"

typedef struct pli_kernels pli_kernels;

/* The context is current.  `compute` is the device's capability: 90 for 9.0.
 * PL_EUNSUPPORTED, naming the driver's version and what to do, where neither way
 * works. */
pl_status pli_kernels_load(const pli_driver *driver, int compute, const char *nvrtc,
                           pli_kernels **out) PL_MUST_USE;
void pli_kernels_unload(pli_kernels *kernels);

/* "fatbin" or "nvrtc" */
const char *pli_kernels_origin(const pli_kernels *kernels);

/* A tensor of a segment: segments of two devices are compared by a checksum of each. */
typedef struct pli_piece {
    void *to;         /* for a refresh; where it lies now */
    const void *from; /* what is summed up, or copied */
    size_t n_bytes;
    size_t offset; /* in its segment, a multiple of PL_CACHE_LINE */
    unsigned segment;
} pli_piece;

/* As the operations of pl_backend_ops; the context is current. */
pl_status pli_kernels_copy(pli_kernels *kernels, const pl_move *moves, size_t n_moves,
                           pl_stream *stream) PL_MUST_USE;
pl_status pli_kernels_add(pli_kernels *kernels, const pl_move *moves, size_t n_moves,
                          pl_stream *stream) PL_MUST_USE;
pl_status pli_kernels_scale(pli_kernels *kernels, const pl_move *moves, size_t n_moves,
                            int numerator, int denominator,
                            pl_stream *stream) PL_MUST_USE;
pl_status pli_kernels_sum(pli_kernels *kernels, const pl_rank_ranges *ranges,
                          pl_stream *stream) PL_MUST_USE;

/* sums[segment] += what stands for the bytes of the segment's pieces, and for where in
 * the segment they are. */
pl_status pli_kernels_checksum(pli_kernels *kernels, const pli_piece *pieces,
                               size_t n_pieces, uint64_t *sums,
                               pl_stream *stream) PL_MUST_USE;

/* Copies the pieces of segments whose sums are not the wanted ones: the device decides,
 * so the host does not wait.  Peers' memory may be read. */
pl_status pli_kernels_refresh(pli_kernels *kernels, const pli_piece *pieces,
                              size_t n_pieces, const uint64_t *sums,
                              const uint64_t *wanted_sums,
                              pl_stream *stream) PL_MUST_USE;

#endif
