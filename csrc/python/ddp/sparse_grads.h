/* sparse_grads.h - gradients that are sparse tensors.
 *
 * A parameter *declared* sparse (POLICY_SPARSE) has no place in the buckets.  Its
 * gradient is counted when it comes and stays where it is.  At the end of the step, the
 * rows that any rank has are averaged over all ranks (sparse_exchange.h).  If any
 * rank's gradient is dense, the mean is dense on every rank.
 *
 * A sparse gradient of any other parameter is reduced as a dense copy.  The result is
 * sparse if no rank's gradient was dense.
 */
#ifndef PLI_SPARSE_GRADS_H
#define PLI_SPARSE_GRADS_H

#include "reducer_object.h"

/* Whether slot i, which is declared sparse, has a gradient: 1, 0, or -1. */
int pli_sparse_has_grad(const reducer_object *self, size_t i);

/* Backward has produced a gradient for slot i, which is declared sparse. */
int pli_sparse_mark_ready(reducer_object *self, size_t i);

/* After the means of the buckets: averages the gradients declared sparse, of all slots.
 * Each slot's target is its mean, unless a communication hook stored that. */
int pli_sparse_finish(reducer_object *self);

/* Makes a mean the gradient of slot i.  Calls nothing that is written in Python. */
int pli_sparse_put(reducer_object *self, size_t i, PyObject *mean);

/* For slot i, not declared sparse: if *grad is sparse, replaces it by a dense copy.
 * Sets the slot's n_sparse_dims accordingly. */
int pli_sparse_densify(reducer_object *self, size_t i, PyObject **grad);

/* Makes the slot's mean the gradient: sparse again, or dense if any rank's gradient was
 * dense. */
int pli_sparse_put_mean(reducer_object *self, size_t i);

#endif
