/* fake_nccl_memory.c - NCCL's memory, and registrations. */
#include "nccl_state.h"

typedef struct registration {
    fk_object object;
    ncclComm_t comm;
    const char *base;
    size_t n_bytes;
} registration;

int fk_is_registered(ncclComm_t comm, const void *at)
{
    for (const fk_object *it = fk.objects; it != NULL; it = it->next) {
        const registration *one = (const registration *)it;
        if (it->kind == FAKE_REGISTRATIONS && !it->is_dead && one->comm == comm &&
            (const char *)at >= one->base &&
            (const char *)at < one->base + one->n_bytes)
            return 1;
    }
    return 0;
}

ncclResult_t ncclMemAlloc(void **out, size_t n_bytes)
{
    FAKE_CALL(ncclMemAlloc);
    const CUcontext context = fk_current();
    if (n_bytes == 0)
        return fk_leave(ncclInvalidArgument);
    const int result = fk_alloc(context != NULL ? context->device : 0, n_bytes, 1, out);
    return fk_leave(result == CUDA_SUCCESS ? ncclSuccess : ncclUnhandledCudaError);
}

/* Neither freeing nor deregistering waits for the device. */
static void check_in_flight(const void *memory, int is_of_nccl, const char *what)
{
    const fk_op *op = fk_in_flight(memory, is_of_nccl);
    if (op != NULL)
        fk_error("%s: #%d (%s) is in flight and touches the memory", what, op->id,
                 op->what);
}

ncclResult_t ncclMemFree(void *memory)
{
    FAKE_CALL(ncclMemFree);
    if (memory == NULL)
        return fk_leave(ncclSuccess);
    for (const fk_object *it = fk.objects; it != NULL; it = it->next)
        if (it->kind == FAKE_REGISTRATIONS && !it->is_dead &&
            ((const registration *)it)->base == memory)
            fk_error("ncclMemFree: the memory is still registered");
    check_in_flight(memory, 0, "ncclMemFree");
    const int result = fk_free(memory, 1);
    return fk_leave(result == CUDA_SUCCESS ? ncclSuccess : ncclInvalidArgument);
}

static int add_registration(ncclComm_t comm, void *memory, size_t n_bytes, void **out)
{
    if (comm == NULL || comm->object.is_dead || memory == NULL || n_bytes == 0)
        return ncclInvalidArgument;
    if (!fk_check_range(memory, n_bytes, "ncclCommRegister"))
        return ncclInvalidUsage;
    registration *it = fk_new(sizeof *it);
    it->comm = comm;
    it->base = memory;
    it->n_bytes = n_bytes;
    fk_object_add(&it->object, FAKE_REGISTRATIONS);
    *out = it;
    return ncclSuccess;
}

void fk_drop_registrations(const ncclComm_t comm)
{
    for (fk_object *it = fk.objects; it != NULL; it = it->next)
        if (it->kind == FAKE_REGISTRATIONS && !it->is_dead &&
            ((registration *)it)->comm == comm)
            fk_object_kill(it);
}

static int drop_registration(ncclComm_t comm, void *handle)
{
    registration *it = handle;
    if (it == NULL || it->object.is_dead || it->comm != comm)
        return ncclInvalidArgument;
    if (comm->object.is_dead)
        fk_error("memory is deregistered after the communicator's end");
    check_in_flight(it->base, 1, "ncclCommDeregister");
    fk_object_kill(&it->object);
    return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *memory, size_t n_bytes,
                              void **out)
{
    FAKE_CALL(ncclCommRegister);
    return fk_leave(add_registration(comm, memory, n_bytes, out));
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle)
{
    FAKE_CALL(ncclCommDeregister);
    if (comm != NULL && fk_proxy_block(comm, 1, "ncclCommDeregister") != ncclSuccess)
        return fk_leave(ncclInternalError);
    return fk_leave(drop_registration(comm, handle));
}
