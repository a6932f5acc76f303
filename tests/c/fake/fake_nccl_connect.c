/* fake_nccl_connect.c - connections that are made by the first collective of a kind.
 *
 * Since NCCL 2.22 the host blocks in that call until all ranks are in it.
 */
#include "nccl_state.h"

static unsigned bit_of(const fk_task *task)
{
    const int is_pair = task->kind == FK_SEND || task->kind == FK_RECV;
    return is_pair || !fk.options.lazy_connect ? 0 : 1u << task->kind;
}

void fk_connect_begin(ncclComm_t comm, const fk_task *task)
{
    const unsigned bit = bit_of(task);
    if ((comm->connected & bit) == bit)
        return;
    (void)atomic_fetch_or(&comm->world->board->connecting[comm->rank], bit);
    fk_moved();
}

int fk_connect_is_done(const ncclComm_t comm, const fk_task *task)
{
    const unsigned bit = bit_of(task);
    if ((comm->connected & bit) == bit)
        return 1;
    for (int r = 0; r < comm->n_ranks; r++)
        if ((atomic_load(&comm->world->board->connecting[r]) & bit) == 0)
            return 0;
    return 1;
}

int fk_connect_wait(ncclComm_t comm, const fk_task *task, const char *what)
{
    const int64_t since = fk_now();
    while (comm->world != NULL && !fk_connect_is_done(comm, task)) {
        if (fk_is_alone() || !fk_pause(since)) {
            fk_error("%s: rank %d of %d waits in its first collective of a kind for "
                     "ranks that never come",
                     what, comm->rank, comm->n_ranks);
            return ncclInternalError;
        }
    }
    if (comm->world == NULL)
        return ncclInternalError; /* aborted by another thread */
    comm->connected |= bit_of(task);
    return ncclSuccess;
}
