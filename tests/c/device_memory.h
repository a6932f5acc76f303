/* device_memory.h - an allocator for worlds on fake devices: torch's, whose memory
 * lives as long as the world or a view holds it.
 */
#ifndef PLT_DEVICE_MEMORY_H
#define PLT_DEVICE_MEMORY_H

#include <stdlib.h>

#include "backend/cuda.h"
#include "check.h"
#include "fake/fake.h"
#include "nccl/gpu_comm.h"

typedef struct device_memory {
    void *address;
    atomic_int n_refs;
} device_memory;

static inline void device_memory_hold(device_memory *self)
{
    atomic_fetch_add(&self->n_refs, 1);
}

static inline void device_memory_drop(device_memory *self)
{
    if (self == NULL || atomic_fetch_sub(&self->n_refs, 1) > 1)
        return;
    fake_torch_free(self->address);
    free(self);
}

static inline pl_status device_memory_alloc(void *backend, size_t n_bytes,
                                            pli_device_memory *out)
{
    pl_status st = PL_OK;
    device_memory *self = calloc(1, sizeof *self);
    if (self == NULL)
        exit(2);
    self->address = fake_torch_alloc(pli_cuda_device(backend), n_bytes);
    atomic_store(&self->n_refs, 1);
    if (self->address == NULL) {
        free(self);
        PL_FAIL(PL_ENOMEM, "torch is out of memory for %zu bytes", n_bytes);
    }
    *out = (pli_device_memory){.address = self->address, .owner = self};
done:
    return st;
}

static inline pl_status device_memory_record(void *backend, void *owner,
                                             pl_stream *stream)
{
    (void)backend;
    fake_torch_record(((device_memory *)owner)->address, (CUstream)(void *)stream);
    return PL_OK;
}

static inline void device_memory_release(void *backend, void *owner)
{
    (void)backend;
    device_memory_drop(owner);
}

static inline pli_device_allocator device_allocator(pl_backend *backend)
{
    return (pli_device_allocator){.alloc = device_memory_alloc,
                                  .record_stream = device_memory_record,
                                  .release = device_memory_release,
                                  .context = backend};
}

#endif
