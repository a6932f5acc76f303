/* watchdog.c - a thread that walks a list under a lock.
 *
 * The thread releases the lock while it checks a world; `current` is that world's
 * context.  To remove that world, a caller waits until the check has ended.
 */
#include "watchdog.h"

#include <errno.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/clock.h"
#include "core/process.h"

enum { TICK_MS = 100 };

typedef struct entry {
    void (*check)(void *context);
    void *context;
} entry;

struct pli_watchdog {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* the list, `current`, or is_stopped */
    pthread_t thread;       /* valid if is_running */
    int is_running;
    int is_stopped; /* the thread must end; joins and leaves wait until it has */
    pid_t owner_pid;
    entry *entries;
    size_t n_entries;
    size_t capacity;
    const void *current; /* of the check under way */
};

static void init_locks(pli_watchdog *self)
{
    pthread_condattr_t attributes;
    (void)pthread_mutex_init(&self->lock, NULL); /* none of these fails on Linux */
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&self->changed, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    self->owner_pid = getpid();
}

pl_status pli_watchdog_create(pli_watchdog **out)
{
    pl_status st = PL_OK;
    pli_watchdog *self = NULL;
    PL_TRY(pli_calloc(1, sizeof *self, "a watchdog", &self));
    init_locks(self);
    *out = self;
done:
    return st;
}

static void rest_locked(pli_watchdog *self)
{
    const int64_t until = pli_now_ns() + TICK_MS * PLI_MS;
    const struct timespec at = {.tv_sec = (time_t)(until / INT64_C(1000000000)),
                                .tv_nsec = (long)(until % INT64_C(1000000000))};
    int error = 0;
    while (!self->is_stopped && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&self->changed, &self->lock, &at);
}

static void check_all_locked(pli_watchdog *self)
{
    /* The last entry takes the place of one that leaves, and is skipped this time. */
    for (size_t i = 0; i < self->n_entries && !self->is_stopped; i++) {
        const entry one = self->entries[i];
        self->current = one.context;
        (void)pthread_mutex_unlock(&self->lock);
        one.check(one.context);
        (void)pthread_mutex_lock(&self->lock);
        self->current = NULL;
        (void)pthread_cond_broadcast(&self->changed);
    }
}

static void *run(void *argument)
{
    pli_watchdog *self = argument;
    (void)pthread_mutex_lock(&self->lock);
    while (!self->is_stopped) {
        rest_locked(self);
        check_all_locked(self);
    }
    (void)pthread_mutex_unlock(&self->lock);
    return NULL;
}

static void await_end_locked(pli_watchdog *self)
{
    while (self->is_stopped)
        (void)pthread_cond_wait(&self->changed, &self->lock);
}

pl_status pli_watchdog_join(pli_watchdog *self, void (*check)(void *context),
                            void *context)
{
    pl_status st = PL_OK;
    (void)pthread_mutex_lock(&self->lock);
    await_end_locked(self);
    PL_TRY(pli_grow(self->n_entries, sizeof *self->entries, "the watched worlds",
                    &self->capacity, &self->entries));
    if (!self->is_running)
        PL_TRY(pli_thread_start(run, self, "watches the GPUs' work", &self->thread));
    self->is_running = 1;
    self->entries[self->n_entries++] = (entry){check, context};
done:
    (void)pthread_mutex_unlock(&self->lock);
    return st;
}

/* Ends the thread.  The caller holds the lock, which is free meanwhile. */
static void stop_locked(pli_watchdog *self)
{
    self->is_stopped = 1;
    (void)pthread_cond_broadcast(&self->changed);
    (void)pthread_mutex_unlock(&self->lock);
    (void)pthread_join(self->thread, NULL);
    (void)pthread_mutex_lock(&self->lock);
    self->is_running = 0;
    self->is_stopped = 0;
    (void)pthread_cond_broadcast(&self->changed);
}

void pli_watchdog_leave(pli_watchdog *self, const void *context)
{
    if (self->owner_pid != getpid())
        return;
    (void)pthread_mutex_lock(&self->lock);
    for (size_t i = 0; i < self->n_entries; i++) {
        if (self->entries[i].context != context)
            continue;
        self->entries[i] = self->entries[--self->n_entries];
        break;
    }
    while (self->current == context)
        (void)pthread_cond_wait(&self->changed, &self->lock);
    await_end_locked(self);
    if (self->n_entries == 0 && self->is_running)
        stop_locked(self);
    (void)pthread_mutex_unlock(&self->lock);
}

void pli_watchdog_forget(pli_watchdog *self)
{
    if (self == NULL || self->owner_pid == getpid())
        return;
    init_locks(self); /* the threads that held them do not exist here */
    self->is_running = self->is_stopped = 0;
    self->current = NULL;
    self->n_entries = 0;
}

void pli_watchdog_destroy(pli_watchdog *self)
{
    if (self == NULL)
        return;
    if (self->owner_pid == getpid()) {
        (void)pthread_cond_destroy(&self->changed);
        (void)pthread_mutex_destroy(&self->lock);
    }
    pli_free(self->entries);
    pli_free(self);
}
