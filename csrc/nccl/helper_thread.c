/* helper_thread.c - the last thread to use a helper, by its `phase`, frees it. */
#include "helper_thread.h"

#include <pthread.h>
#include <stdatomic.h>

#include "core/alloc.h"
#include "core/process.h"

enum { MESSAGE_BYTES = 768 };

typedef enum helper_phase { HELPER_RUNNING, HELPER_DONE, HELPER_LEFT } helper_phase;

struct pli_helper {
    pli_helper_job job;
    atomic_int phase; /* helper_phase */
    pl_status status;
    char message[MESSAGE_BYTES];
};

static void *run(void *argument)
{
    pli_helper *self = argument;
    self->status = self->job.run(self->job.context);
    if (self->status != PL_OK)
        pli_text_print(self->message, sizeof self->message, "%s", pl_error_message());
    if (atomic_exchange(&self->phase, HELPER_DONE) == HELPER_LEFT) {
        self->job.drop(self->job.context);
        pli_free(self);
    }
    return NULL;
}

pl_status pli_helper_start(const pli_helper_job *job, pli_helper **out)
{
    pl_status st = PL_OK;
    pli_helper *self = NULL;
    pthread_t thread;
    PL_TRY(pli_calloc(1, sizeof *self, "a helper thread", &self));
    self->job = *job;
    *out = self;
    if (pli_thread_start(run, self, job->name, &thread) == PL_OK)
        (void)pthread_detach(thread);
    else
        (void)run(self);
done:
    return st;
}

pl_status pli_helper_wait(const pli_helper *self, pli_backoff *waiting,
                          const char *what)
{
    pl_status st = PL_OK;
    while (atomic_load(&self->phase) == HELPER_RUNNING)
        PL_TRY(pli_backoff_pause(waiting, what));
done:
    return st;
}

pl_status pli_helper_result(const pli_helper *self)
{
    return self->status == PL_OK ? PL_OK : pli_fail(self->status, "%s", self->message);
}

pli_helper_end_state pli_helper_end(pli_helper *self)
{
    if (atomic_exchange(&self->phase, HELPER_LEFT) != HELPER_DONE)
        return PLI_HELPER_LEFT;
    pli_free(self);
    return PLI_HELPER_ENDED;
}
