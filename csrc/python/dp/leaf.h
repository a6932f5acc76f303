/* leaf.h - what scatter and gather ask of a tensor or an array. */
#ifndef PLI_LEAF_H
#define PLI_LEAF_H

#include "python/state.h"
#include "replicas/shape.h"

int pli_leaf_shape(const module_state *state, PyObject *leaf, pli_shape *out);

/* "(2, 3)" */
PyObject *pli_shape_text(const pli_shape *shape);

/* `n` rows of a leaf from row `start`, a view; autograd knows a tensor's. */
PyObject *pli_leaf_narrow(PyObject *leaf, Py_ssize_t dim, Py_ssize_t start,
                          Py_ssize_t n);

#endif
