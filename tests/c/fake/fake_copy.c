/* fake_copy.c - calls on memory: allocate, free, copy, fill. */
#include "state.h"

static void *pointer_of(CUdeviceptr memory)
{
    return (void *)(uintptr_t)memory; /* NOLINT: CUDA's addresses are numbers */
}

/* ---- allocations ---------------------------------------------------------------- */

static int maybe_wait(int device)
{
    const int how = fk.options.alloc_waits;
    const int is_random = fk.options.schedule == FAKE_RANDOM;
    if (how == 1 || (how == 2 && is_random && fk_below(2) == 0))
        return fk_wait_device(device, "cuMemAlloc");
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *out, size_t n_bytes)
{
    CUcontext context = NULL;
    void *memory = NULL;
    FAKE_CALL(cuMemAlloc);
    FAKE_TRY(fk_need_context(&context));
    FAKE_TRY(fk_forbid_unsafe("cuMemAlloc"));
    if (n_bytes == 0)
        return fk_leave(CUDA_ERROR_INVALID_VALUE);
    FAKE_TRY(maybe_wait(context->device));
    FAKE_TRY(fk_alloc(context->device, n_bytes, &memory));
    *out = (CUdeviceptr)(uintptr_t)memory;
    return fk_leave(CUDA_SUCCESS);
}

/* Waits for all work of its device. */
CUresult cuMemFree(CUdeviceptr memory)
{
    FAKE_CALL(cuMemFree);
    if (memory == 0)
        return fk_leave(CUDA_SUCCESS);
    FAKE_TRY(fk_forbid_unsafe("cuMemFree"));
    const int device = fk_device_of(pointer_of(memory));
    if (device >= 0)
        (void)fk_wait_device(device, "cuMemFree");
    return fk_leave(fk_free(pointer_of(memory)));
}

CUresult cuMemGetInfo(size_t *available, size_t *total)
{
    CUcontext context = NULL;
    FAKE_CALL(cuMemGetInfo);
    FAKE_TRY(fk_need_context(&context));
    *total = (size_t)fk.options.capacity;
    *available = (size_t)(fk.options.capacity - context->n_bytes);
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuMemHostAlloc(void **out, size_t n_bytes, unsigned flags)
{
    CUcontext context = NULL;
    FAKE_CALL(cuMemHostAlloc);
    (void)flags;
    FAKE_TRY(fk_need_context(&context));
    FAKE_TRY(fk_forbid_unsafe("cuMemHostAlloc"));
    void *memory = aligned_alloc(4096, (n_bytes + 4095) / 4096 * 4096);
    if (memory == NULL)
        return fk_leave(CUDA_ERROR_OUT_OF_MEMORY);
    fk_pin(memory, n_bytes, 1);
    *out = memory;
    return fk_leave(CUDA_SUCCESS);
}

static int wait_all_devices(const char *who)
{
    int result = CUDA_SUCCESS;
    for (int i = 0; i < fk.options.devices && result == CUDA_SUCCESS; i++)
        result = fk_wait_device(i, who);
    return result;
}

CUresult cuMemFreeHost(void *memory)
{
    FAKE_CALL(cuMemFreeHost);
    FAKE_TRY(fk_forbid_unsafe("cuMemFreeHost"));
    (void)wait_all_devices("cuMemFreeHost");
    return fk_leave(fk_unpin(memory, 1));
}

CUresult cuMemHostRegister(void *memory, size_t n_bytes, unsigned flags)
{
    CUcontext context = NULL;
    FAKE_CALL(cuMemHostRegister);
    (void)flags;
    FAKE_TRY(fk_need_context(&context));
    fk_pin(memory, n_bytes, 0);
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuMemHostUnregister(void *memory)
{
    FAKE_CALL(cuMemHostUnregister);
    (void)wait_all_devices("cuMemHostUnregister");
    return fk_leave(fk_unpin(memory, 0));
}

/* ---- copies --------------------------------------------------------------------- */

typedef struct copy {
    void *to;
    const void *from;
    size_t n_bytes;
    int is_to_device;
    int is_from_device;
    const char *what;
    int is_corrupt;
} copy;

/* Host memory that is not pinned is read at the call, and written when the call
 * returns; pinned memory is read and written at any time. */
static int enqueue_copy(const copy *it, CUstream handle)
{
    CUstream stream = NULL;
    int result = fk_stream(handle, &stream);
    if (result != CUDA_SUCCESS || it->n_bytes == 0)
        return result;
    fk_op *op = fk_op_new(FK_COPY, stream->device, it->what);
    op->to = it->to;
    op->from = it->from;
    op->n_bytes = it->n_bytes;
    op->is_to_device = it->is_to_device;
    op->is_from_device = it->is_from_device;
    op->is_corrupt = it->is_corrupt;
    const int is_captured = stream->capture != NULL;
    if (!it->is_from_device && !fk_is_pinned(it->from) && !is_captured) {
        op->staged = fk_new(it->n_bytes);
        memcpy(op->staged, it->from, it->n_bytes);
    }
    const int waits = !it->is_to_device && !fk_is_pinned(it->to) && !is_captured;
    (void)fk_op_hold(op);
    result = fk_enqueue(op, stream);
    if (result == CUDA_SUCCESS && waits)
        result = fk_wait_for(op, it->what);
    fk_op_drop(op);
    return result;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t n_bytes,
                           CUstream stream)
{
    FAKE_CALL(cuMemcpyHtoDAsync);
    const copy it = {pointer_of(to), from, n_bytes, 1, 0, "cuMemcpyHtoDAsync", 0};
    return fk_leave(enqueue_copy(&it, stream));
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t n_bytes, CUstream stream)
{
    FAKE_CALL(cuMemcpyDtoHAsync);
    const copy it = {to, pointer_of(from), n_bytes, 0, 1, "cuMemcpyDtoHAsync", 0};
    return fk_leave(enqueue_copy(&it, stream));
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t n_bytes,
                           CUstream stream)
{
    FAKE_CALL(cuMemcpyDtoDAsync);
    const copy it = {
        pointer_of(to), pointer_of(from), n_bytes, 1, 1, "cuMemcpyDtoDAsync", 0};
    return fk_leave(enqueue_copy(&it, stream));
}

/* Whether allocated memory belongs to the given context. */
static int is_of(CUcontext context, CUdeviceptr memory, const char *side)
{
    const int owner = fk_owner_of(pointer_of(memory));
    if (context == NULL || context->n_retained == 0)
        return 0;
    if (owner < 0 || owner == context->device)
        return 1;
    fk_error("cuMemcpyPeerAsync: what is copied %s is device %d's, not device %d's",
             side, owner, context->device);
    return 0;
}

/* Works with peer access or without: then through host memory. */
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                           CUcontext from_context, size_t n_bytes, CUstream stream)
{
    FAKE_CALL(cuMemcpyPeerAsync);
    copy it = {pointer_of(to), pointer_of(from), n_bytes, 1, 1, "cuMemcpyPeerAsync", 0};
    if (!is_of(to_context, to, "to") || !is_of(from_context, from, "from"))
        return fk_leave(CUDA_ERROR_INVALID_VALUE);
    it.is_corrupt = fk_is_corrupt(from_context->device, to_context->device);
    from_context->sent_bytes[to_context->device] += (int64_t)n_bytes;
    return fk_leave(enqueue_copy(&it, stream));
}

FAKE_GETTER(int64_t, fake_sent_bytes, (int device, int to),
            fk.contexts[device].sent_bytes[to])

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n_bytes,
                         CUstream handle)
{
    CUstream stream = NULL;
    FAKE_CALL(cuMemsetD8Async);
    FAKE_TRY(fk_stream(handle, &stream));
    if (n_bytes == 0)
        return fk_leave(CUDA_SUCCESS);
    fk_op *op = fk_op_new(FK_FILL, stream->device, "cuMemsetD8Async");
    op->to = pointer_of(to);
    op->value = value;
    op->n_bytes = n_bytes;
    op->is_to_device = 1;
    return fk_leave(fk_enqueue(op, stream));
}
