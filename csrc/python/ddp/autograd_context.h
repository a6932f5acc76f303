/* autograd_context.h - gradients of a backward of torch.distributed.autograd. */
#ifndef PLI_AUTOGRAD_CONTEXT_H
#define PLI_AUTOGRAD_CONTEXT_H

#include "reducer_object.h"

/* Before `close`: finds the gradients, where they are in a context. */
int pli_context_open(reducer_object *self);

/* The step is over, or was given up. */
void pli_context_close(reducer_object *self);

#endif
