/* backward_end_type.h - being called when a backward ends. */
#ifndef PLI_BACKWARD_END_TYPE_H
#define PLI_BACKWARD_END_TYPE_H

#include "reducer_object.h"

/* Who queues a callback.  The backward in which an output's hook runs holds all of that
 * forward's graph; one in which a parameter's hook runs may be inside that. */
typedef enum backward_end_origin {
    QUEUED_BY_OUTPUT,
    QUEUED_BY_PARAMETER,
    QUEUED_BY_LOCAL_OUTPUT, /* one whose backward is not synchronised: ends that */
} backward_end_origin;

/* Asks the engine to call us when this backward ends, unless it will already. */
int pli_backward_end_queue(reducer_object *self, backward_end_origin origin);

/* A backward begins whose forward was not to be synchronised: none of it is. */
int pli_backward_end_queue_local(reducer_object *self);

/* On a GPU, and with RPC: waits, for a while, until no callback is queued.  A backward
 * that failed in a thread of torch's raises in the caller's, which may be here before
 * that thread has dropped what it refers to.  Not for use in a backward. */
int pli_backward_end_await(const reducer_object *self);

#endif
