/* dropped_backward.h - a backward that ends without a call. */
#ifndef PLI_DROPPED_BACKWARD_H
#define PLI_DROPPED_BACKWARD_H

#include "reducer_object.h"

/* The exception in sight, as a new reference, or NULL: one that an `except` or
 * `finally` holds, or the last uncaught one. */
PyObject *pli_find_exception(void);

/* unwound_keeper(kept) -> callable, of the module */
PyObject *pli_unwound_keeper(PyObject *module, PyObject *kept);

/* Fails the step at once; sends the traceback when the exception is in sight. */
void pli_failed_backward_report(reducer_object *reducer);

/* The engine dropped its callbacks: the compiled backward for which step number `step`
 * was begun has ended or failed.  `handled`: the exception that was in sight when it
 * began. */
void pli_compiled_backward_ends(reducer_object *reducer, uint64_t step,
                                const void *handled);

#endif
