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

#endif
