/* helper_thread.h - makes a call that may never return, in a separate thread.
 *
 *     pli_helper_start(&job, &helper)
 *     pli_helper_wait(helper, &waiting, "...")   as long as the caller wants to wait
 *     pli_helper_end(helper)                     frees the helper, or leaves it behind
 *
 * The call writes only to `context`: a thread that is left behind still does so, and
 * drops `context` once the call has returned.
 */
#ifndef PLI_HELPER_THREAD_H
#define PLI_HELPER_THREAD_H

#include "core/backoff.h"
#include "core/status.h"

typedef struct pli_helper pli_helper;

typedef struct pli_helper_job {
    pl_status (*run)(void *context);
    void (*drop)(void *context); /* called if the thread was left behind */
    void *context;
    const char *name; /* of the thread, for a message */
} pli_helper_job;

typedef enum pli_helper_end_state {
    PLI_HELPER_ENDED, /* the caller owns the context again */
    PLI_HELPER_LEFT,  /* the thread owns it */
} pli_helper_end_state;

/* If no thread can be started, makes the call here.  PL_ENOMEM: it was not made. */
pl_status pli_helper_start(const pli_helper_job *job, pli_helper **out) PL_MUST_USE;

/* PL_OK: the call has returned.  Otherwise: why the wait ended. */
pl_status pli_helper_wait(const pli_helper *helper, pli_backoff *waiting,
                          const char *what) PL_MUST_USE;

/* The status and message of the call; after pli_helper_wait() has returned PL_OK. */
pl_status pli_helper_result(const pli_helper *helper) PL_MUST_USE;

/* Frees the helper, or leaves the thread behind. */
pli_helper_end_state pli_helper_end(pli_helper *helper);

#endif
