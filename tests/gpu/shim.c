/* shim.c - the CUDA backend's table as flat functions, for ctypes.
 *
 * Linked with csrc/core, csrc/backend and csrc/comm into a library that tests alone
 * load (kernels_library.py): the extension itself shows none of this.
 */
#include "backend/cuda.h"

#define SHIM __attribute__((visibility("default")))

SHIM pl_status shim_open(int device, const char *driver, const char *nvrtc,
                         pl_backend **out);
SHIM void shim_close(pl_backend *backend);
SHIM const char *shim_words(void);
SHIM const char *shim_kernels(const pl_backend *backend);
SHIM void shim_layout(size_t out[8]);
SHIM pl_status shim_copy(pl_backend *backend, const pl_move *moves, size_t n_moves,
                         pl_stream *stream);
SHIM pl_status shim_add(pl_backend *backend, const pl_move *moves, size_t n_moves,
                        pl_stream *stream);
SHIM pl_status shim_scale(pl_backend *backend, const pl_move *moves, size_t n_moves,
                          int numerator, int denominator, pl_stream *stream);
SHIM pl_status shim_sum(pl_backend *backend, const pl_rank_ranges *ranges,
                        pl_stream *stream);
SHIM pl_status shim_checksum(pl_backend *backend, const pli_piece *pieces,
                             size_t n_pieces, uint64_t *sums, pl_stream *stream);
SHIM pl_status shim_refresh(pl_backend *backend, const pli_piece *pieces,
                            size_t n_pieces, const uint64_t *sums,
                            const uint64_t *wanted_sums, pl_stream *stream);
SHIM pl_status shim_synchronize(pl_backend *backend, pl_stream *stream);

pl_status shim_open(int device, const char *driver, const char *nvrtc, pl_backend **out)
{
    pli_cuda_options options = {.device = device, .driver = driver, .nvrtc = nvrtc};
    return pli_cuda_backend_create(&options, out);
}

void shim_close(pl_backend *backend)
{
    pli_backend_destroy(backend);
}

const char *shim_words(void)
{
    return pl_error_message();
}

const char *shim_kernels(const pl_backend *backend)
{
    return pli_cuda_kernels(backend);
}

/* What kernels_library.py believes of the structures, to be compared. */
void shim_layout(size_t out[8])
{
    out[0] = sizeof(pl_move);
    out[1] = offsetof(pl_move, dtype);
    out[2] = offsetof(pl_move, n_elems);
    out[3] = sizeof(pl_rank_ranges);
    out[4] = offsetof(pl_rank_ranges, dtype);
    out[5] = offsetof(pl_rank_ranges, n_elems);
    out[6] = sizeof(pli_piece);
    out[7] = offsetof(pli_piece, segment);
}

pl_status shim_copy(pl_backend *backend, const pl_move *moves, size_t n_moves,
                    pl_stream *stream)
{
    return backend->ops->copy(backend, moves, n_moves, stream);
}

pl_status shim_add(pl_backend *backend, const pl_move *moves, size_t n_moves,
                   pl_stream *stream)
{
    return backend->ops->add(backend, moves, n_moves, stream);
}

pl_status shim_scale(pl_backend *backend, const pl_move *moves, size_t n_moves,
                     int numerator, int denominator, pl_stream *stream)
{
    return backend->ops->scale(backend, moves, n_moves, numerator, denominator, stream);
}

pl_status shim_sum(pl_backend *backend, const pl_rank_ranges *ranges, pl_stream *stream)
{
    return backend->ops->sum(backend, ranges, stream);
}

pl_status shim_checksum(pl_backend *backend, const pli_piece *pieces, size_t n_pieces,
                        uint64_t *sums, pl_stream *stream)
{
    return pli_cuda_checksum(backend, pieces, n_pieces, sums, stream);
}

pl_status shim_refresh(pl_backend *backend, const pli_piece *pieces, size_t n_pieces,
                       const uint64_t *sums, const uint64_t *wanted_sums,
                       pl_stream *stream)
{
    return pli_cuda_refresh(backend, pieces, n_pieces, sums, wanted_sums, stream);
}

pl_status shim_synchronize(pl_backend *backend, pl_stream *stream)
{
    return backend->ops->synchronize(backend, stream);
}
