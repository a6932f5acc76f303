/* grads.h - one gradient on its way into its slot. */
#ifndef PLI_GRADS_H
#define PLI_GRADS_H

#include "reducer_object.h"

/* Reads the parameter's gradient, as a dense copy if it is sparse.  Returns 1 and *out
 * (new reference), 0 if it has none, or -1. */
int pli_grads_read(reducer_object *self, size_t i, PyObject **out, pli_tensor *tensor);

/* A step begins, with the gradient of slot `first`: notes which gradients existed
 * before, since the user may keep them. */
int pli_grads_note(reducer_object *self, size_t first);

/* Backward has produced a gradient for slot i. */
int pli_grads_mark_ready(reducer_object *self, size_t i);

/* Makes a tensor in slot i's layout: the parameter's may have changed. */
PyObject *pli_grads_make_empty(reducer_object *self, size_t i);

/* Before the end of the step: slot i got no gradient. */
int pli_grads_mark_unused(reducer_object *self, size_t i);

/* Writes what slot i adds in the second all-reduce. */
int pli_grads_write_late(reducer_object *self, size_t i);

#endif
