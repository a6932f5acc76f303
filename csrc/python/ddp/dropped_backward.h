/* dropped_backward.h - a backward that ends without a call. */
#ifndef PLI_DROPPED_BACKWARD_H
#define PLI_DROPPED_BACKWARD_H

#include "reducer_object.h"

/* The exception in sight, as a new reference, or NULL: what an `except` or `finally`
 * has, or what nobody caught. */
PyObject *pli_find_exception(void);

/* unwound_keeper(kept) -> callable, of the module */
PyObject *pli_unwound_keeper(PyObject *module, PyObject *kept);

/* Fails the step at once, and sends the traceback when the exception is in sight. */
void pli_failed_backward_report(reducer_object *reducer);

/* The engine has dropped its callbacks: the compiled backward that step number `step`
 * was begun for is over, or has failed.  `handled`: the exception that was in sight
 * when it began. */
void pli_compiled_backward_ends(reducer_object *reducer, uint64_t step,
                                const void *handled);

#endif
