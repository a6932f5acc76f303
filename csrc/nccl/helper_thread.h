/* helper_thread.h - a call that may never return, made in a thread of its own.
 *
 *     pli_helper_start(&job, &helper)
 *     pli_helper_wait(helper, &waiting, "...")   as long as the caller wants to wait
 *     pli_helper_end(helper)                     has it ended, or is it left behind?
 *
 * What the call touches is in `context`.  A thread that is left behind drops it once
 * the call has returned; so nothing that it writes to may belong to anybody else.
 */
#ifndef PLI_HELPER_THREAD_H
#define PLI_HELPER_THREAD_H

#include "core/backoff.h"
#include "core/status.h"

typedef struct pli_helper pli_helper;

typedef struct pli_helper_job {
    pl_status (*run)(void *context);
    void (*drop)(void *context); /* called where the thread was left behind */
    void *context;
    const char *name; /* of the thread, for a message */
} pli_helper_job;

typedef enum pli_helper_end_state {
    PLI_HELPER_ENDED, /* the context is the caller's again */
    PLI_HELPER_LEFT,  /* ... is the thread's */
} pli_helper_end_state;

/* Where no thread can be had the call is made here.  PL_ENOMEM: it was not made. */
pl_status pli_helper_start(const pli_helper_job *job, pli_helper **out) PL_MUST_USE;

/* PL_OK: the call has returned.  Else why this caller waits no longer. */
pl_status pli_helper_wait(const pli_helper *helper, pli_backoff *waiting,
                          const char *what) PL_MUST_USE;

/* What the call has returned, with its message; after pli_helper_wait(). */
pl_status pli_helper_result(const pli_helper *helper) PL_MUST_USE;

/* Frees the helper, or leaves the thread behind. */
pli_helper_end_state pli_helper_end(pli_helper *helper);

#endif
