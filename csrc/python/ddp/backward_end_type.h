/* backward_end_type.h - run code when a backward ends. */
#ifndef PLI_BACKWARD_END_TYPE_H
#define PLI_BACKWARD_END_TYPE_H

#include "reducer_object.h"

/* What queues a callback.  The backward in which an output's hook runs holds the whole
 * graph of that forward; a parameter's hook may run in a backward inside that one. */
typedef enum backward_end_origin {
    QUEUED_BY_OUTPUT,
    QUEUED_BY_PARAMETER,
    QUEUED_BY_LOCAL_OUTPUT, /* of a backward that is not synchronised */
} backward_end_origin;

/* Makes the engine call us when this backward ends, unless that is queued already. */
int pli_backward_end_queue(reducer_object *self, backward_end_origin origin);

/* The backward of a forward that is not synchronised begins: do not synchronise it. */
int pli_backward_end_queue_local(reducer_object *self);

/* On a GPU, and with RPC: waits up to a second until no callback is queued.  If a
 * backward fails in a thread of torch, the caller sees the exception possibly before
 * that thread has dropped its callbacks.  Must not be called inside a backward. */
int pli_backward_end_await(const reducer_object *self);

/* unwound_keeper(kept) -> callable, of the module */
PyObject *pli_unwound_keeper(PyObject *module, PyObject *kept);

#endif
