/* module_buffers.h - sends the root's buffers; the other ranks take them over. */
#ifndef PLI_MODULE_BUFFERS_H
#define PLI_MODULE_BUFFERS_H

#include "reducer_object.h"

/* The getter of Reducer.has_other_buffers. */
PyObject *pli_buffers_get_are_others(PyObject *object, void *closure);

/* Writes the root's buffers to the memory that it sends with each step. */
int pli_buffers_pack(reducer_object *self);

/* After the step: takes over the root's buffers, or defers that. */
int pli_buffers_receive(reducer_object *self);

/* Takes over the deferred buffers. */
int pli_buffers_apply(reducer_object *self);

/* A step failed or was dropped: the values sent last may differ between ranks. */
void pli_buffers_forget(reducer_object *self);

/* Before a training forward: gives all ranks the root's current buffers.  Not for a
 * GPU, and not for a join context. */
int pli_buffers_sync(reducer_object *self);

#endif
