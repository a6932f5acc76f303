/* peer_watch.c - processes and sockets of the peers, asked without waiting. */
#include "peer_watch.h"

#include <poll.h>
#include <unistd.h>

void pli_watch_init(pli_watch *watch, int n_ranks)
{
    watch->n_ranks = n_ranks;
    for (int r = 0; r < PL_MAX_RANKS; r++) {
        watch->process[r] = NULL;
        watch->socket[r] = -1;
        watch->is_sure[r] = 0;
    }
}

pl_status pli_watch_add(pli_watch *watch, pli_processes *processes, int rank, int pid)
{
    pl_status st = pli_process_open(processes, pid, &watch->process[rank]);
    if (st == PL_EPEER)
        st = pli_fail(PL_EPEER, "rank %d (process %d) is gone", rank, pid);
    return st;
}

static int is_closed(int fd)
{
    /* A socket hangs up: peers send nothing later. */
    struct pollfd one = {.fd = fd, .events = POLLIN};
    return fd >= 0 && poll(&one, 1, 0) > 0;
}

int pli_watch_ended(const pli_watch *watch, pli_end end, int from)
{
    for (int r = from; r < watch->n_ranks; r++) {
        const pli_process *process = watch->process[r];
        if (end == PLI_PROCESS_ENDED ? process != NULL && pli_process_has_ended(process)
                                     : is_closed(watch->socket[r]))
            return r;
    }
    return -1;
}

int pli_watch_is_sure(const pli_watch *watch, int rank)
{
    const pli_process *process = watch->process[rank];
    return process != NULL && pli_process_is_sure(process);
}

static void close_socket(pli_watch *watch, int rank)
{
    if (watch->socket[rank] >= 0)
        (void)close(watch->socket[rank]);
    watch->socket[rank] = -1;
}

void pli_watch_drop_sockets(pli_watch *watch)
{
    for (int r = 0; r < watch->n_ranks; r++)
        if (watch->is_sure[r])
            close_socket(watch, r);
}

void pli_watch_fini(pli_watch *watch)
{
    for (int r = 0; r < watch->n_ranks; r++) {
        pli_process_close(watch->process[r]);
        close_socket(watch, r);
    }
    pli_watch_init(watch, 0);
}
