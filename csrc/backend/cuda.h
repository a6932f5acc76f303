/* cuda.h - GPU memory behind the backend's table.
 *
 * There is one backend per device and process.  It shares the device's primary context
 * with torch, so both can use each other's streams, events and pointers.  Any thread
 * may call it, whatever context is current there.  Moves run as kernels (kernels.h) on
 * the stream that the caller passes.  Only alloc, free, clear, read, write and
 * synchronize wait for the device.  A training step in steady state allocates nothing.
 */
#ifndef PLI_CUDA_H
#define PLI_CUDA_H

#include "backend.h"
#include "driver.h"
#include "kernels.h"

typedef struct pli_cuda_options {
    int device;         /* torch's index */
    const char *driver; /* path of libcuda; NULL: see pli_driver_open() */
    const char *nvrtc;  /* path of libnvrtc, used if the driver does not accept the
                           built-in kernels; NULL: see pli_nvrtc_compile() */
} pli_cuda_options;

/* *out: the process's backend of that device and driver, created by the first call.
 * Callers share it by reference count: pli_backend_destroy() drops one reference, and
 * the last drop frees.  In a forked child, which cannot use CUDA, destroy does nothing.
 * PL_EINVAL for a device out of range, PL_EUNSUPPORTED without driver or kernels. */
pl_status pli_cuda_backend_create(const pli_cuda_options *options,
                                  pl_backend **out) PL_MUST_USE;

/* Adds a reference. */
void pli_cuda_backend_retain(pl_backend *backend);

int pli_cuda_device(const pl_backend *backend);

/* Where the backend's kernels come from: "fatbin" or "nvrtc". */
const char *pli_cuda_kernels(const pl_backend *backend);

const pli_driver *pli_cuda_driver(const pl_backend *backend);

/* The device's one high-priority stream for communication; it does not synchronize with
 * the legacy default stream. */
pl_stream *pli_cuda_side_stream(pl_backend *backend);

/* Non-zero in *out if work on `stream` is being captured into a graph. */
pl_status pli_cuda_is_capturing(pl_backend *backend, pl_stream *stream,
                                int *out) PL_MUST_USE;

/* Between enter and leave, the device's context is current in this thread, and calls
 * that a capture in another thread would forbid are allowed.  Scopes nest. */
typedef struct pli_cuda_scope {
    int is_pushed; /* another context was current before */
    int capture_mode;
} pli_cuda_scope;
pl_status pli_cuda_enter(pl_backend *backend, pli_cuda_scope *out) PL_MUST_USE;
void pli_cuda_leave(pl_backend *backend, const pli_cuda_scope *scope);

/* Writes zeros, and waits until they are written. */
pl_status pli_cuda_clear(pl_backend *backend, void *memory, size_t n_bytes) PL_MUST_USE;

/* As pli_kernels_checksum() and pli_kernels_refresh(). */
pl_status pli_cuda_checksum(pl_backend *backend, const pli_piece *pieces,
                            size_t n_pieces, uint64_t *sums,
                            pl_stream *stream) PL_MUST_USE;
pl_status pli_cuda_refresh(pl_backend *backend, const pli_piece *pieces,
                           size_t n_pieces, const uint64_t *sums,
                           const uint64_t *wanted_sums, pl_stream *stream) PL_MUST_USE;

/* Copies between host and device, and waits until the copy is done. */
pl_status pli_cuda_read(pl_backend *backend, void *to, const void *from, size_t n_bytes,
                        pl_stream *stream) PL_MUST_USE;
pl_status pli_cuda_write(pl_backend *backend, void *to, const void *from,
                         size_t n_bytes, pl_stream *stream) PL_MUST_USE;

/* ---- two devices ---------------------------------------------------------------- */

/* Memory of one device. */
typedef struct pli_cuda_place {
    pl_backend *backend;
    void *memory;
} pli_cuda_place;

/* Enqueues a copy on a stream of `backend`; both places may be on one device. */
pl_status pli_cuda_copy_between(pli_cuda_place to, pli_cuda_place from, size_t n_bytes,
                                pl_backend *backend, pl_stream *stream) PL_MUST_USE;

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
