/* kernels.h - loads the kernels of kernels.cu and launches them.
 *
 * They come from a fatbin inside the extension, if nvcc built one and the driver takes
 * it.  Otherwise NVRTC compiles the same source, which is inside the extension too.  A
 * launch passes its table of work by value, as a kernel parameter: a table in memory
 * could be overwritten before the launch, or a replay of a captured one, reads it.
 */
#ifndef PLI_KERNELS_H
#define PLI_KERNELS_H

#include "backend.h"
#include "driver.h"

typedef struct pli_kernels pli_kernels;

/* The context must be current.  `compute` is the device's capability: 90 for 9.0.
 * PL_EUNSUPPORTED if neither way works; the message names the driver's version and
 * says what to do. */
pl_status pli_kernels_load(const pli_driver *driver, int compute, const char *nvrtc,
                           pli_kernels **out) PL_MUST_USE;
void pli_kernels_unload(pli_kernels *kernels);

/* "fatbin" or "nvrtc" */
const char *pli_kernels_origin(const pli_kernels *kernels);

/* A tensor of a segment.  Segments of two devices are compared by their checksums. */
typedef struct pli_piece {
    void *to;         /* refresh: where the tensor is now */
    const void *from; /* what a checksum or a refresh reads */
    size_t n_bytes;
    size_t offset; /* in its segment; a multiple of PL_CACHE_LINE */
    unsigned segment;
} pli_piece;

/* As the operations of pl_backend_ops; the context must be current. */
pl_status pli_kernels_copy(pli_kernels *kernels, const pl_move *moves, size_t n_moves,
                           pl_stream *stream) PL_MUST_USE;
pl_status pli_kernels_add(pli_kernels *kernels, const pl_move *moves, size_t n_moves,
                          pl_stream *stream) PL_MUST_USE;
pl_status pli_kernels_scale(pli_kernels *kernels, const pl_move *moves, size_t n_moves,
                            int numerator, int denominator,
                            pl_stream *stream) PL_MUST_USE;
pl_status pli_kernels_sum(pli_kernels *kernels, const pl_rank_ranges *ranges,
                          pl_stream *stream) PL_MUST_USE;

/* Adds to sums[segment], for each of its pieces, a hash of the bytes and of their
 * offsets in the segment. */
pl_status pli_kernels_checksum(pli_kernels *kernels, const pli_piece *pieces,
                               size_t n_pieces, uint64_t *sums,
                               pl_stream *stream) PL_MUST_USE;

/* Copies the pieces of segments whose sums differ from the wanted ones.  The device
 * decides, so the host does not wait.  May read peers' memory. */
pl_status pli_kernels_refresh(pli_kernels *kernels, const pli_piece *pieces,
                              size_t n_pieces, const uint64_t *sums,
                              const uint64_t *wanted_sums,
                              pl_stream *stream) PL_MUST_USE;

#endif
