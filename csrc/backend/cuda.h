/* cuda.h - GPU memory behind the backend's table.
 *
 * One backend a device and process.  It shares the device's primary context with torch,
 * so streams, events and pointers are the same things on both sides; any thread may
 * call it, whatever context is current there.  Its moves are kernels (kernels.h) on the
 * stream that the caller names; nothing here waits for the device but alloc, free,
 * clear, read, write and synchronize, and nothing in a training step's steady state
 * allocates.
 */
#ifndef PLI_CUDA_H
#define PLI_CUDA_H

#include "backend.h"
#include "driver.h"
#include "kernels.h"

typedef struct pli_cuda_options {
    int device;         /* as torch counts */
    const char *driver; /* path of libcuda; NULL: see pli_driver_open() */
    const char *nvrtc;  /* path of libnvrtc, should the driver be too old for the
                           built-in kernels; NULL: none is known */
} pli_cuda_options;

/* *out: the process's backend of that device and driver, made by the first to ask.
 * Users are counted: pli_backend_destroy() counts one out, and the last one frees;
 * in a forked child, where CUDA cannot be used, it does nothing.  PL_EINVAL for a
 * device out of range, PL_EUNSUPPORTED without a driver or kernels for it. */
pl_status pli_cuda_backend_create(const pli_cuda_options *options,
                                  pl_backend **out) PL_MUST_USE;

/* Counts one more user in. */
void pli_cuda_backend_retain(pl_backend *backend);

int pli_cuda_device(const pl_backend *backend);

/* Borrowed. */
pli_cu_context pli_cuda_context(const pl_backend *backend);

/* Where its kernels come from: "fatbin" or "nvrtc". */
const char *pli_cuda_kernels(const pl_backend *backend);

const pli_driver *pli_cuda_driver(const pl_backend *backend);

/* The device's one high-priority stream for communication; never blocks with the legacy
 * default stream. */
pl_stream *pli_cuda_side_stream(pl_backend *backend);

/* Non-zero in *out where what `stream` is given is being captured into a graph. */
pl_status pli_cuda_is_capturing(pl_backend *backend, pl_stream *stream,
                                int *out) PL_MUST_USE;
/* ... of one of n; non-zero also where the driver does not say. */
static inline int pli_cuda_may_any_be_captured(pl_backend *backend,
                                               pl_stream *const *streams, int n)
{
    for (int i = 0; i < n; i++) {
        int is_captured = 0;
        if (pli_cuda_is_capturing(backend, streams[i], &is_captured) != PL_OK ||
            is_captured)
            return 1;
    }
    return 0;
}

static inline pli_cu_stream pli_as_cu_stream(pl_stream *stream)
{
    return (pli_cu_stream)(void *)stream;
}

static inline pli_cu_memory pli_as_cu_memory(const void *memory)
{
    return (pli_cu_memory)(uintptr_t)memory;
}

/* Between the two, in this thread: the device's context is current, and calls that a
 * capture in another thread would forbid are allowed.  They nest. */
typedef struct pli_cuda_scope {
    int is_pushed; /* another context was current */
    int capture_mode;
} pli_cuda_scope;
pl_status pli_cuda_enter(pl_backend *backend, pli_cuda_scope *out) PL_MUST_USE;
void pli_cuda_leave(pl_backend *backend, const pli_cuda_scope *scope);

/* Writes zeros, and returns when they are there. */
pl_status pli_cuda_clear(pl_backend *backend, void *memory, size_t n_bytes) PL_MUST_USE;

/* As pli_kernels_checksum() and pli_kernels_refresh(). */
pl_status pli_cuda_checksum(pl_backend *backend, const pli_piece *pieces,
                            size_t n_pieces, uint64_t *sums,
                            pl_stream *stream) PL_MUST_USE;
pl_status pli_cuda_refresh(pl_backend *backend, const pli_piece *pieces,
                           size_t n_pieces, const uint64_t *sums,
                           const uint64_t *wanted_sums, pl_stream *stream) PL_MUST_USE;

/* Copies between host and device; return when they are done. */
pl_status pli_cuda_read(pl_backend *backend, void *to, const void *from, size_t n_bytes,
                        pl_stream *stream) PL_MUST_USE;
pl_status pli_cuda_write(pl_backend *backend, void *to, const void *from,
                         size_t n_bytes, pl_stream *stream) PL_MUST_USE;

#endif
