/* grads.h - one gradient on its way into its slot. */
#ifndef PLI_GRADS_H
#define PLI_GRADS_H

#include "reducer_object.h"

/* Reads the parameter's gradient, a dense copy where it is sparse: 1 and *out (new
 * reference), 0 where it has none, -1. */
int pli_grads_read(reducer_object *self, size_t i, PyObject **out, pli_tensor *tensor);

/* A step begins, with the gradient of slot `first`: notes which are there already, and
 * may be kept by somebody. */
int pli_grads_note(reducer_object *self, size_t first);

/* Backward has produced a gradient for slot i. */
int pli_grads_mark_ready(reducer_object *self, size_t i);

/* A tensor of torch's own in the layout of slot i: the parameter's may be another now.
 */
PyObject *pli_grads_make_empty(reducer_object *self, size_t i);

/* Before the end of the step: slot i got none. */
int pli_grads_mark_unused(reducer_object *self, size_t i);

/* What slot i has to add in the second all-reduce. */
int pli_grads_write_late(reducer_object *self, size_t i);

#endif
