/* fake_nccl_proxy.c - NCCL's proxies, which send the data of operations.
 *
 * With options.net an operation is done when the others' parts have come and its own
 * part lies with the proxy, which sends it later: at a random time, or when a thread
 * waits for it.  An abort ends the proxy at once, with all that it holds.
 */
#include "nccl_state.h"

void fk_proxy_send(ncclComm_t comm, fk_post *post, uint64_t number)
{
    if (!fk.options.net) {
        atomic_store(&post->number, number);
        return;
    }
    comm->unsent = realloc(comm->unsent, (comm->n_unsent + 1) * sizeof *comm->unsent);
    if (comm->unsent == NULL)
        abort();
    post->number_to_be = number;
    comm->unsent[comm->n_unsent++] = post;
}

int fk_proxy_has(const ncclComm_t comm, const fk_post *post, uint64_t number)
{
    for (size_t i = 0; i < comm->n_unsent; i++)
        if (comm->unsent[i] == post && post->number_to_be == number)
            return 1;
    return 0;
}

static void send_oldest(ncclComm_t comm)
{
    fk_post *post = comm->unsent[0];
    comm->n_unsent--;
    memmove(comm->unsent, comm->unsent + 1, comm->n_unsent * sizeof *comm->unsent);
    atomic_store(&post->number, post->number_to_be);
    fk_moved();
}

void fk_proxy_flush(ncclComm_t comm)
{
    while (comm->n_unsent > 0)
        send_oldest(comm);
}

void fk_proxy_drop(ncclComm_t comm)
{
    free(comm->unsent);
    comm->unsent = NULL;
    comm->n_unsent = 0;
}

int fk_proxy_step(int waiting_device)
{
    ncclComm_t chosen = NULL;
    for (const fk_world *world = fk.worlds; world != NULL; world = world->next)
        for (int r = 0; r < world->n_ranks; r++) {
            const ncclComm_t comm = world->comms[r];
            if (comm != NULL && comm->n_unsent > 0 &&
                (chosen == NULL || chosen->device == waiting_device))
                chosen = comm;
        }
    if (chosen != NULL)
        send_oldest(chosen);
    return chosen != NULL;
}

void fk_proxy_some(void)
{
    if (!fk.options.net || fk.options.schedule == FAKE_LATE)
        return;
    while ((fk.options.schedule == FAKE_EARLY || fk_below(8) == 0) && fk_proxy_step(-1))
        continue;
}

int fk_proxy_block(ncclComm_t comm, const char *what)
{
    const int64_t since = fk_now();
    while (fk.options.proxy_blocks && !comm->is_aborted)
        if (!fk_pause(since)) {
            fk_error("%s: communicator %d waits for its proxy, and is not aborted",
                     what, comm->object.id);
            break;
        }
    return comm->is_aborted ? ncclInternalError : ncclSuccess;
}
