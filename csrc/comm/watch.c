/* watch.c - pidfds and sockets of the peers, asked without waiting. */
#include "watch.h"

#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../core/alloc.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3; one number on all architectures */
#endif

void pli_watch_init(pli_watch *watch, int n_ranks)
{
    watch->n_ranks = n_ranks;
    for (int r = 0; r < PL_MAX_RANKS; r++)
        watch->pidfd[r] = watch->socket[r] = -1;
}

pl_status pli_watch_add(pli_watch *watch, int rank, int pid)
{
    pl_status st = PL_OK;
    const int fd = (int)PL_SYS(syscall(SYS_pidfd_open, pid, 0));
    if (fd >= 0)
        watch->pidfd[rank] = fd;
    else if (errno == ESRCH)
        PL_FAIL(PL_EPEER, "rank %d (process %d) is gone", rank, pid);
    else if (errno != ENOSYS && errno != EPERM)
        PL_FAIL_ERRNO("cannot watch rank %d (process %d)", rank, pid);
done:
    return st;
}

static int has_ended(int fd)
{
    /* A pidfd becomes readable, a socket hangs up: peers send nothing later. */
    struct pollfd one = {.fd = fd, .events = POLLIN};
    return fd >= 0 && poll(&one, 1, 0) > 0;
}

int pli_watch_ended(const pli_watch *watch, pli_end end, int from)
{
    const int *fds = end == PLI_PROCESS_ENDED ? watch->pidfd : watch->socket;
    for (int r = from; r < watch->n_ranks; r++)
        if (has_ended(fds[r]))
            return r;
    return -1;
}

void pli_watch_fini(pli_watch *watch)
{
    for (int r = 0; r < watch->n_ranks; r++) {
        if (watch->pidfd[r] >= 0)
            (void)close(watch->pidfd[r]);
        if (watch->socket[r] >= 0)
            (void)close(watch->socket[r]);
    }
    pli_watch_init(watch, 0);
}
