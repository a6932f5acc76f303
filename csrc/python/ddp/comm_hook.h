/* comm_hook.h - buckets that a communication hook averages; without a hook every call
 * is a no-op. */
#ifndef PLI_COMM_HOOK_H
#define PLI_COMM_HOOK_H

#include "reducer_object.h"

/* Returns -1 if there are late gradients, which no hook can take. */
int pli_comm_hook_check_late(reducer_object *self);

/* After `wait`: waits for what the hook has started, and writes it to the slots. */
int pli_comm_hook_finish(reducer_object *self);

/* Instead of exchanging rows: the hook averages the gradients declared sparse. */
int pli_comm_hook_finish_sparse(reducer_object *self);

/* After the hook's results arrived: waits until every rank has its own. */
int pli_comm_hook_confirm(reducer_object *self);

/* The step failed: lets the hook drop work in flight. */
void pli_comm_hook_abandon(reducer_object *self);

/* The step or the backward fails with the exception that is set.  If that is a
 * RuntimeError, such as a PeerError, and the hook returned something other than a
 * future, raises the error about the hook instead. */
void pli_comm_hook_raise_refusal(reducer_object *self);

/* Methods of the Reducer. */
PyObject *pli_comm_hook_set(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *pli_comm_hook_poll(PyObject *object, PyObject *ignored);
PyObject *pli_comm_hook_read_bucket(PyObject *object, PyObject *args);
PyObject *pli_comm_hook_write_bucket(PyObject *object, PyObject *args);

#endif
