/* grad_results.h - reduced gradients become `.grad`. */
#ifndef PLI_GRAD_RESULTS_H
#define PLI_GRAD_RESULTS_H

#include "reducer_object.h"

/* After the step: the slot holds the reduced gradient, or every rank left the parameter
 * unused.  Copies are deferred; everything that the step refers to lives until
 * pli_results_finish(). */
int pli_results_bind(reducer_object *self, size_t i);

/* After all are bound: makes the copies, and drops what the step refers to. */
int pli_results_finish(reducer_object *self);

/* Drops what the step refers to, without results. */
void pli_results_drop(reducer_object *self, size_t i);

#endif
