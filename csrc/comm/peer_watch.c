/* peer_watch.c - polls the peers' processes and sockets without waiting. */
#include "peer_watch.h"

#include <poll.h>
#include <unistd.h>

#include "core/alloc.h"

enum { AT_ONCE = 256 }; /* descriptors per system call */

pl_status pli_watch_init(pli_watch *watch, int n_ranks)
{
    pl_status st = PL_OK;
    *watch = (pli_watch){.n_ranks = 0};
    PL_TRY(pli_calloc((size_t)n_ranks, sizeof *watch->ranks, "a watch over the peers",
                      &watch->ranks));
    watch->n_ranks = n_ranks;
    for (int r = 0; r < n_ranks; r++)
        watch->ranks[r].socket = -1;
done:
    return st;
}

pl_status pli_watch_add(pli_watch *watch, pli_processes *processes, int rank, int pid)
{
    pl_status st = pli_process_open(processes, pid, &watch->ranks[rank].process);
    if (st == PL_EPEER)
        st = pli_fail(PL_EPEER, "rank %d (process %d) died", rank, pid);
    return st;
}

/* The descriptor that becomes readable at `end`; -1 if none does. */
static int descriptor_of(const pli_watched *rank, pli_end end)
{
    if (end == PLI_SOCKET_CLOSED)
        return rank->socket; /* peers send nothing more */
    return rank->process != NULL ? pli_process_descriptor(rank->process) : -1;
}

static int has_ended(const pli_watched *rank, pli_end end, const struct pollfd *polled)
{
    if (polled->fd >= 0)
        return polled->revents != 0;
    return end == PLI_PROCESS_ENDED && rank->process != NULL &&
           pli_process_has_ended(rank->process);
}

int pli_watch_ended(const pli_watch *watch, pli_end end, int from)
{
    while (from < watch->n_ranks) {
        struct pollfd polled[AT_ONCE];
        const pli_watched *ranks = watch->ranks + from;
        int n = watch->n_ranks - from;
        int n_open = 0;
        n = n < AT_ONCE ? n : AT_ONCE;
        for (int i = 0; i < n; i++) {
            polled[i] =
                (struct pollfd){.fd = descriptor_of(&ranks[i], end), .events = POLLIN};
            n_open += polled[i].fd >= 0;
        }
        if (n_open > 0)
            (void)poll(polled, (nfds_t)n, 0);
        for (int i = 0; i < n; i++)
            if (has_ended(&ranks[i], end, &polled[i]))
                return from + i;
        from += n;
    }
    return -1;
}

int pli_watch_is_sure(const pli_watch *watch, int rank)
{
    const pli_process *process = watch->ranks[rank].process;
    return process != NULL && pli_process_is_sure(process);
}

static void close_socket(pli_watched *rank)
{
    if (rank->socket >= 0)
        (void)close(rank->socket);
    rank->socket = -1;
}

void pli_watch_drop_sockets(pli_watch *watch)
{
    for (int r = 0; r < watch->n_ranks; r++)
        if (watch->ranks[r].is_sure)
            close_socket(&watch->ranks[r]);
}

void pli_watch_fini(pli_watch *watch)
{
    for (int r = 0; r < watch->n_ranks; r++) {
        pli_process_close(watch->ranks[r].process);
        close_socket(&watch->ranks[r]);
    }
    pli_free(watch->ranks);
    *watch = (pli_watch){.n_ranks = 0};
}
