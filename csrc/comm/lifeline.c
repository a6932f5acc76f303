/* lifeline.c - one thread in poll(). */
#include "lifeline.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "../core/alloc.h"

typedef struct lifeline {
    struct pollfd ends[2];
} lifeline;

static void *watch(void *argument)
{
    lifeline *self = argument;
    int n_ready = 0;
    do
        n_ready = poll(self->ends, 2, -1);
    while (n_ready == 0 || (n_ready < 0 && (errno == EINTR || errno == EAGAIN)));
    _exit(1); /* lint: no-exit - the process that it worked for is gone */
}

pl_status pli_lifeline_start(int pidfd, int pipe_fd)
{
    pl_status st = PL_OK;
    lifeline *self = NULL;
    pthread_t thread;
    sigset_t all, before;
    if (pidfd < 0 && pipe_fd < 0)
        PL_FAIL(PL_EINVAL, "a lifeline needs a descriptor to watch");
    PL_TRY(pli_calloc(1, sizeof *self, "lifeline", &self));
    self->ends[0] = (struct pollfd){.fd = pidfd, .events = POLLIN};
    self->ends[1] = (struct pollfd){.fd = pipe_fd, .events = POLLIN};
    /* Signals are for the threads that know of them. */
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    errno = pthread_create(&thread, NULL, watch, self);
    const int error = errno;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    if (error != 0)
        PL_FAIL_ERRNO("cannot start the thread that watches the parent process");
    (void)pthread_detach(thread);
    self = NULL; /* the thread's, which never ends */
done:
    pli_free(self);
    return st;
}
