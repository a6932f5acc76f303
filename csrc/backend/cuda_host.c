/* cuda_host.c - reads, writes and clears device memory, and waits until it is done. */
#include "cuda.h"

/* Waits for the copy whose enqueueing gave `result`, and leaves the scope. */
static pl_status finish_copy(pl_backend *backend, const pli_cuda_scope *scope,
                             pli_cu_result result, pli_cu_stream stream,
                             const char *doing)
{
    const pli_driver *const driver = pli_cuda_driver(backend);
    if (result == 0)
        result = driver->cuStreamSynchronize(stream);
    pli_cuda_leave(backend, scope);
    return pli_driver_check(driver, result, doing);
}

pl_status pli_cuda_read(pl_backend *backend, void *to, const void *from, size_t n_bytes,
                        pl_stream *stream)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = pli_cuda_driver(backend);
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result = driver->cuMemcpyDtoHAsync(
        to, pli_as_cu_memory(from), n_bytes, pli_as_cu_stream(stream));
    PL_TRY(finish_copy(backend, &scope, result, pli_as_cu_stream(stream),
                       "copying from the device"));
done:
    return st;
}

pl_status pli_cuda_write(pl_backend *backend, void *to, const void *from,
                         size_t n_bytes, pl_stream *stream)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = pli_cuda_driver(backend);
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result = driver->cuMemcpyHtoDAsync(
        pli_as_cu_memory(to), from, n_bytes, pli_as_cu_stream(stream));
    PL_TRY(finish_copy(backend, &scope, result, pli_as_cu_stream(stream),
                       "copying to the device"));
done:
    return st;
}

/* Uses a new stream, so that it does not wait for long work on others. */
pl_status pli_cuda_clear(pl_backend *backend, void *memory, size_t n_bytes)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = pli_cuda_driver(backend);
    pli_cu_stream stream = NULL;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    pli_cu_result result =
        driver->cuStreamCreateWithPriority(&stream, PLI_CU_STREAM_NON_BLOCKING, 0);
    if (result == 0)
        result = driver->cuMemsetD8Async(pli_as_cu_memory(memory), 0, n_bytes, stream);
    st = finish_copy(backend, &scope, result, stream, "clearing device memory");
    if (stream != NULL)
        (void)driver->cuStreamDestroy(stream);
done:
    return st;
}
