/* parent_watch.c - one thread in poll(). */
#include "parent_watch.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/process.h"

typedef struct parent_watch {
    struct pollfd ends[2];
} parent_watch;

static void *watch(void *argument)
{
    parent_watch *self = argument;
    int n_ready = 0;
    do
        n_ready = poll(self->ends, 2, -1);
    while (n_ready == 0 || (n_ready < 0 && (errno == EINTR || errno == EAGAIN)));
    if (getpgrp() == getpid())
        (void)kill(0, SIGKILL); /* this process too */
    _exit(1); /* lint: no-exit - the parent that needed this process is gone */
}

pl_status pli_parent_watch_start(int pidfd, int pipe_fd)
{
    pl_status st = PL_OK;
    parent_watch *self = NULL;
    pthread_t thread;
    if (pidfd < 0 && pipe_fd < 0)
        PL_FAIL(PL_EINVAL, "both descriptors are negative: give one to watch");
    /* If this process is stopped when its parent ends, the thread must run again.  The
     * kernel also sends this signal when only the thread ends that forked this process;
     * unlike SIGKILL, it does no harm then. */
    (void)prctl(PR_SET_PDEATHSIG, SIGCONT);
    PL_TRY(pli_calloc(1, sizeof *self, "parent watch", &self));
    self->ends[0] = (struct pollfd){.fd = pidfd, .events = POLLIN};
    self->ends[1] = (struct pollfd){.fd = pipe_fd, .events = POLLIN};
    PL_TRY(pli_thread_start(watch, self, "watches the parent process", &thread));
    (void)pthread_detach(thread);
    self = NULL; /* the thread owns it, and never returns */
done:
    pli_free(self);
    return st;
}
