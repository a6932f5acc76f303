/* progress.c - a list of worlds under a lock that waiters only try. */
#include "progress.h"

#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/clock.h"

struct pli_progress {
    pthread_mutex_t lock;
    pl_comm **comms;
    size_t n_comms;
    size_t capacity;
    uint64_t process; /* 0: not drawn yet */
};

pl_status pli_progress_create(pli_progress **out)
{
    pl_status st = PL_OK;
    pli_progress *progress = NULL;
    PL_TRY(pli_calloc(1, sizeof *progress, "progress of worlds", &progress));
    pli_progress_forget(progress);
    *out = progress;
done:
    return st;
}

void pli_progress_forget(pli_progress *progress)
{
    (void)pthread_mutex_init(&progress->lock, NULL); /* cannot fail on Linux */
    progress->n_comms = 0;
    progress->process = 0;
}

uint64_t pli_progress_process(pli_progress *progress)
{
    if (progress == NULL)
        return 0;
    (void)pthread_mutex_lock(&progress->lock);
    if (progress->process == 0 &&
        getrandom(&progress->process, sizeof progress->process, 0) !=
            (ssize_t)sizeof progress->process)
        progress->process = (uint64_t)pli_now_ns() << 22 ^ (uint64_t)getpid();
    const uint64_t process = progress->process;
    (void)pthread_mutex_unlock(&progress->lock);
    return process;
}

void pli_progress_destroy(pli_progress *progress)
{
    if (progress == NULL)
        return;
    (void)pthread_mutex_destroy(&progress->lock);
    pli_free(progress->comms);
    pli_free(progress);
}

pl_status pli_progress_join(pli_progress *progress, pl_comm *comm)
{
    pl_status st = PL_OK;
    if (progress == NULL)
        return PL_OK;
    (void)pthread_mutex_lock(&progress->lock);
    PL_TRY(pli_grow(progress->n_comms, sizeof *progress->comms, "list of worlds",
                    &progress->capacity, &progress->comms));
    progress->comms[progress->n_comms++] = comm;
done:
    (void)pthread_mutex_unlock(&progress->lock);
    return st;
}

void pli_progress_leave(pli_progress *progress, const pl_comm *comm)
{
    if (progress == NULL)
        return;
    (void)pthread_mutex_lock(&progress->lock);
    for (size_t i = 0; i < progress->n_comms; i++) {
        if (progress->comms[i] != comm)
            continue;
        progress->comms[i] = progress->comms[--progress->n_comms];
        break;
    }
    (void)pthread_mutex_unlock(&progress->lock);
}

void pli_progress_others(pli_progress *progress, const pl_comm *but)
{
    /* The thread that holds the lock does the same, or changes the list briefly. */
    if (progress == NULL || pthread_mutex_trylock(&progress->lock) != 0)
        return;
    for (size_t i = 0; i < progress->n_comms; i++)
        if (progress->comms[i] != but)
            progress->comms[i]->ops->work(progress->comms[i]);
    (void)pthread_mutex_unlock(&progress->lock);
}

int pli_progress_any_other(pli_progress *progress, const pl_comm *but,
                           pli_comm_predicate predicate, const void *context)
{
    int is_true = 0;
    if (progress == NULL || pthread_mutex_trylock(&progress->lock) != 0)
        return 0;
    for (size_t i = 0; i < progress->n_comms && !is_true; i++)
        is_true = progress->comms[i] != but && predicate(progress->comms[i], context);
    (void)pthread_mutex_unlock(&progress->lock);
    return is_true;
}
