/* comm_hook.h - buckets that a communication hook averages. */
#ifndef PLI_COMM_HOOK_H
#define PLI_COMM_HOOK_H

#include "reducer_object.h"

/* The step or the backward fails with the exception that is set.  If that is a
 * RuntimeError, such as a PeerError, and the hook returned something other than a
 * future, raises the error about the hook instead. */
void pli_comm_hook_raise_refusal(reducer_object *self);

/* What a step with a hook calls. */
extern const pl_step_hook pli_comm_hook;

/* Methods of the Reducer. */
PyObject *pli_comm_hook_poll(PyObject *object, PyObject *ignored);
PyObject *pli_comm_hook_read_bucket(PyObject *object, PyObject *args);
PyObject *pli_comm_hook_write_bucket(PyObject *object, PyObject *args);

#endif
