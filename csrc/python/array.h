/* array.h - NumPy's arrays; only array.c uses NumPy's C interface.
 *
 * The first check of a value loads that interface, but only if the program has imported
 * NumPy: otherwise no value can be an array.
 */
#ifndef PLI_ARRAY_H
#define PLI_ARRAY_H

#include "state.h"

/* 1 for an array, 0 for anything else, or -1. */
int pli_array_check(PyObject *value);

/* The argument must be an array. */
int pli_array_n_dims(PyObject *array);
Py_ssize_t pli_array_size(PyObject *array, int dim);

#endif
