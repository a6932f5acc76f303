/* grads.h - one gradient on its way into its slot and back; and the window through
 * which gradients see their slots (comm/window.h). */
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

/* Before the end of the step: slot i got no gradient. */
int pli_grads_mark_unused(reducer_object *self, size_t i);

/* Writes what slot i adds in the second all-reduce. */
int pli_grads_write_late(reducer_object *self, size_t i);

/* After the step: the slot holds the reduced gradient, or every rank left the parameter
 * unused.  Copies are deferred; everything that the step refers to lives until
 * pli_results_finish(). */
int pli_results_bind(reducer_object *self, size_t i);

/* After all are bound: makes the copies, and drops what the step refers to. */
int pli_results_finish(reducer_object *self);

/* Drops what the step refers to, without results. */
void pli_results_drop(reducer_object *self, size_t i);

/* If the window has views, leaves it to them; they keep their values. */
int pli_grad_window_retire(reducer_object *self);

/* Makes the window show the current plan; holders of old views keep their values. */
int pli_grad_window_refresh(reducer_object *self);

#endif
