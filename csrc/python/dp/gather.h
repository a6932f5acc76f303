/* gather.h - gather(outputs, sizes, dim, join=None). */
#ifndef PLI_GATHER_H
#define PLI_GATHER_H

#include "python/state.h"

PyObject *pli_gather(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

#endif
