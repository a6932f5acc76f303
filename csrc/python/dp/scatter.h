/* scatter.h - scatter(inputs, kwargs, n, dim). */
#ifndef PLI_SCATTER_H
#define PLI_SCATTER_H

#include "python/state.h"

PyObject *pli_scatter(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

#endif
