/* compiled_backward.h - the end of a backward that compiled autograd runs. */
#ifndef PLI_COMPILED_BACKWARD_H
#define PLI_COMPILED_BACKWARD_H

#include "reducer_object.h"

/* The engine has dropped its callbacks: the compiled backward that step number `step`
 * was begun for is over, or has failed.  `handled`: the exception that was in sight
 * when it began. */
void pli_compiled_backward_ends(reducer_object *reducer, uint64_t step,
                                const void *handled);

#endif
