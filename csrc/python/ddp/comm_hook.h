/* comm_hook.h - buckets that a communication hook averages; every call is a no-op where
 * there is no hook. */
#ifndef PLI_COMM_HOOK_H
#define PLI_COMM_HOOK_H

#include "reducer_object.h"

/* -1 where there are late gradients, which no hook can take. */
int pli_comm_hook_check_late(reducer_object *self);

/* After `wait`: waits for what the hook has begun, and puts it into the slots. */
int pli_comm_hook_finish(reducer_object *self);

/* In place of the exchange of rows: the hook averages declared sparse gradients. */
int pli_comm_hook_finish_sparse(reducer_object *self);

/* Once a hook's results are there: waits until every rank has its own. */
int pli_comm_hook_confirm(reducer_object *self);

/* The step failed: the hook may have work on its way. */
void pli_comm_hook_abandon(reducer_object *self);

/* The step fails, or the backward, with the exception that is set.  Where that is a
 * RuntimeError, such as a PeerError, and the hook has returned what is no future, this
 * is raised in its place. */
void pli_comm_hook_raise_refusal(reducer_object *self);

/* Methods of the Reducer. */
PyObject *pli_comm_hook_set(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *pli_comm_hook_poll(PyObject *object, PyObject *ignored);
PyObject *pli_comm_hook_read_bucket(PyObject *object, PyObject *args);
PyObject *pli_comm_hook_write_bucket(PyObject *object, PyObject *args);

#endif
