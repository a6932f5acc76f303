/* module_buffers.h - what a module keeps beside its parameters. */
#ifndef PLI_MODULE_BUFFERS_H
#define PLI_MODULE_BUFFERS_H

#include "reducer_object.h"

/* The getter of Reducer.has_other_buffers. */
PyObject *pli_buffers_get_are_others(PyObject *object, void *closure);

/* Writes the root's buffers to the memory that it sends with each step. */
int pli_buffers_pack(reducer_object *self);

/* After the step: takes over what came from the root, or defers that. */
int pli_buffers_receive(reducer_object *self);

/* Takes over what was deferred. */
int pli_buffers_apply(reducer_object *self);

/* A step has failed, or was dropped: what was sent may not be the same everywhere. */
void pli_buffers_forget(reducer_object *self);

/* Before a training forward: the root's buffers, as they are now, on all ranks.  Not on
 * a GPU, nor in a join context. */
int pli_buffers_sync(reducer_object *self);

#endif
