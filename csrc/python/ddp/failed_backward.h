/* failed_backward.h - a backward that raised: the peers get the failure, and the
 * traceback after it. */
#ifndef PLI_FAILED_BACKWARD_H
#define PLI_FAILED_BACKWARD_H

#include "reducer_object.h"

/* The exception in sight, as a new reference, or NULL: what an `except` or `finally`
 * has, or what nobody caught. */
PyObject *pli_find_exception(void);

/* unwound_keeper(kept) -> callable, of the module */
PyObject *pli_unwound_keeper(PyObject *module, PyObject *kept);

/* Changes no exception that is set. */
int pli_is_main_thread(void);

/* Fails the step at once, and sends the traceback when the exception is in sight. */
void pli_failed_backward_report(reducer_object *reducer);

/* What a pending call is given, and frees. */
typedef struct pending_call {
    reducer_object *reducer; /* owned */
    const void *handled;     /* an exception to compare with, never read */
    int n_polls;
} pending_call;

/* Has `call` called by the main thread, before it goes on with Python code; -1, without
 * an exception, where that cannot be. */
int pli_call_soon(int (*call)(void *context), reducer_object *reducer,
                  const void *handled);
void pli_pending_call_free(pending_call *self);

#endif
