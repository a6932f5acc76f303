/* leaf.h - what scatter and gather ask of a tensor or an array. */
#ifndef PLI_LEAF_H
#define PLI_LEAF_H

#include "tensor.h"

enum { PLI_SHAPE_UNKNOWN = -1 }; /* n_dims of a nested tensor */

typedef struct pli_shape {
    int n_dims;
    int is_strided; /* not sparse, not nested */
    Py_ssize_t sizes[PLI_MAX_DIMS];
} pli_shape;

int pli_leaf_shape(const module_state *state, PyObject *leaf, pli_shape *out);

/* `dim` counted from the front, or -1 where the shape has no such dimension. */
int pli_shape_dim(const pli_shape *shape, Py_ssize_t dim);

/* "(2, 3)" */
PyObject *pli_shape_text(const pli_shape *shape);

/* `n` rows of a leaf from row `start`; a tensor's are a view that autograd knows. */
PyObject *pli_leaf_narrow(const module_state *state, PyObject *leaf, Py_ssize_t dim,
                          Py_ssize_t start, Py_ssize_t n);

#endif
