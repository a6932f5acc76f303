/* tensor_hash.h - paceline._native.tensor_hash(tensor, most_bytes). */
#ifndef PLI_TENSOR_HASH_H
#define PLI_TENSOR_HASH_H

#include "python/state.h"

PyObject *pli_tensor_hash(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

#endif
