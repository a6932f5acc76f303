/* fake_nccl_connect.c - connections, made by the first collective of a kind.
 *
 * Since NCCL 2.22 that call blocks the host until all ranks are in it, and allocates
 * device memory.  An operation's path depends on its algorithm, which NCCL chooses by
 * kind and size:
 *
 *     bit   kind * 3 + (0: < 64 KiB, 1: < 512 KiB, 2: more)
 */
#include "nccl_state.h"

enum { N_SIZES = 3, SMALL_BYTES = 64 << 10, MEDIUM_BYTES = 512 << 10 };

static unsigned bit_of(const fk_task *task)
{
    if (!fk.options.lazy_connect)
        return 0;
    const size_t n_bytes = task->count * fk_dtype_bytes(task->dtype);
    const unsigned size = n_bytes < SMALL_BYTES ? 0 : n_bytes < MEDIUM_BYTES ? 1 : 2;
    return 1u << ((unsigned)task->kind * N_SIZES + size);
}

static int is_connected(const ncclComm_t comm, unsigned bit)
{
    return (comm->connected & bit) == bit;
}

void fk_connect_begin(ncclComm_t comm, const fk_task *task)
{
    const unsigned bit = bit_of(task);
    if (is_connected(comm, bit))
        return;
    (void)atomic_fetch_or(&comm->world->board->connecting[comm->rank], bit);
    fk_moved();
}

static int is_done(const ncclComm_t comm, const fk_task *task)
{
    const unsigned bit = bit_of(task);
    if (is_connected(comm, bit))
        return 1;
    for (int r = 0; r < comm->n_ranks; r++)
        if ((atomic_load(&comm->world->board->connecting[r]) & bit) == 0)
            return 0;
    return 1;
}

static int finish(ncclComm_t comm, const fk_task *task)
{
    const unsigned bit = bit_of(task);
    struct CUctx_st *context = &fk.contexts[comm->device];
    if (is_connected(comm, bit))
        return ncclSuccess;
    if (context->n_bytes + fk.options.connect_bytes > fk.options.capacity) {
        fk_set_last_error("Cuda failure 2 'out of memory'");
        return ncclUnhandledCudaError;
    }
    context->n_bytes += fk.options.connect_bytes;
    comm->n_connect_bytes += fk.options.connect_bytes;
    comm->connected |= bit;
    fk.n_connections++;
    return ncclSuccess;
}

void fk_disconnect(ncclComm_t comm)
{
    fk.contexts[comm->device].n_bytes -= comm->n_connect_bytes;
    comm->n_connect_bytes = 0;
}

int fk_connect_wait(ncclComm_t comm, const fk_task *task, const char *what)
{
    const int64_t since = fk_now();
    while (!comm->is_aborted && comm->world != NULL && !is_done(comm, task)) {
        if (!fk_pause(since)) {
            fk_error("%s: rank %d of %d waits in its first collective of a kind for "
                     "ranks that never come",
                     what, comm->rank, comm->n_ranks);
            return ncclInternalError;
        }
    }
    if (comm->is_aborted || comm->world == NULL)
        return ncclInternalError; /* by another thread */
    return finish(comm, task);
}
