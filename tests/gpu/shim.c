/* shim.c - the CUDA backend's table as flat functions, for ctypes.
 *
 * Linked with csrc/core, csrc/backend and csrc/comm into a library that only tests load
 * (kernels_library.py).  The extension itself exports none of these functions.
 */
#include "backend/cuda.h"

#define SHIM __attribute__((visibility("default")))
#pragma GCC diagnostic ignored "-Wmissing-prototypes" /* ctypes needs none */

LAYOUT; /* assertions that the structures of kernels_library.py equal C's */

SHIM pl_status shim_open(int device, const char *driver, const char *nvrtc,
                         pl_backend **out)
{
    pli_cuda_options options = {.device = device, .driver = driver, .nvrtc = nvrtc};
    return pli_cuda_backend_create(&options, out);
}

SHIM void shim_close(pl_backend *backend)
{
    pli_backend_destroy(backend);
}

SHIM const char *shim_words(void)
{
    return pl_error_message();
}

SHIM const char *shim_kernels(const pl_backend *backend)
{
    return pli_cuda_kernels(backend);
}

SHIM pl_status shim_copy(pl_backend *backend, const pl_move *moves, size_t n_moves,
                         pl_stream *stream)
{
    return backend->ops->copy(backend, moves, n_moves, stream);
}

SHIM pl_status shim_add(pl_backend *backend, const pl_move *moves, size_t n_moves,
                        pl_stream *stream)
{
    return backend->ops->add(backend, moves, n_moves, stream);
}

SHIM pl_status shim_scale(pl_backend *backend, const pl_move *moves, size_t n_moves,
                          int numerator, int denominator, pl_stream *stream)
{
    return backend->ops->scale(backend, moves, n_moves, numerator, denominator, stream);
}

SHIM pl_status shim_sum(pl_backend *backend, const pl_rank_ranges *ranges,
                        pl_stream *stream)
{
    return backend->ops->sum(backend, ranges, stream);
}

SHIM pl_status shim_checksum(pl_backend *backend, const pli_piece *pieces,
                             size_t n_pieces, uint64_t *sums, pl_stream *stream)
{
    return pli_cuda_checksum(backend, pieces, n_pieces, sums, stream);
}

SHIM pl_status shim_refresh(pl_backend *backend, const pli_piece *pieces,
                            size_t n_pieces, const uint64_t *sums,
                            const uint64_t *wanted_sums, pl_stream *stream)
{
    return pli_cuda_refresh(backend, pieces, n_pieces, sums, wanted_sums, stream);
}

SHIM pl_status shim_synchronize(pl_backend *backend, pl_stream *stream)
{
    return backend->ops->synchronize(backend, stream);
}
