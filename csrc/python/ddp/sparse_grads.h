/* sparse_grads.h - gradients that are sparse tensors.
 *
 * Of a parameter *declared* sparse (POLICY_SPARSE) nothing lies in the buckets: a
 * gradient that comes is counted and stays where it is, and at the end of the step the
 * rows that any rank has are averaged over all (sparse_exchange.h).  Where some rank's
 * is dense, so is the mean, on every rank.
 *
 * A sparse gradient of any other parameter is reduced densely, by a copy, and handed
 * back sparse where no rank's was dense.
 */
#ifndef PLI_SPARSE_GRADS_H
#define PLI_SPARSE_GRADS_H

#include "reducer_object.h"

/* Whether slot i, which is declared sparse, has a gradient: 1, 0, or -1. */
int pli_sparse_has_grad(const reducer_object *self, size_t i);

/* Backward has produced a gradient for slot i, which is declared sparse. */
int pli_sparse_mark_ready(reducer_object *self, size_t i);

/* After the means of the buckets: averages what is declared sparse, of all slots; each
 * slot's target is its mean, unless a communication hook has put that in place. */
int pli_sparse_finish(reducer_object *self);

/* Makes a mean the gradient of slot i.  It calls nothing that is written in Python. */
int pli_sparse_put(reducer_object *self, size_t i, PyObject *mean);

/* The gradient of slot i, which is not declared sparse: if it is sparse, *grad is
 * exchanged for a dense copy.  The slot's n_sparse_dims says which it was. */
int pli_sparse_densify(reducer_object *self, size_t i, PyObject **grad);

/* The mean in the slot becomes the gradient: sparse again, or dense for who has a
 * sparse one while another rank's is dense. */
int pli_sparse_put_mean(reducer_object *self, size_t i);

#endif
