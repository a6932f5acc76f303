/* array.h - NumPy's arrays: the one file that knows its C interface is array.c.
 *
 * NumPy is looked for when something is met that could be an array, and only if someone
 * has imported it: a value cannot be an array otherwise.
 */
#ifndef PLI_ARRAY_H
#define PLI_ARRAY_H

#include "state.h"

/* 1 for an array, 0 for anything else, or -1. */
int pli_array_check(PyObject *value);

/* These take arrays alone. */
int pli_array_is_plain(PyObject *array); /* of no subclass */
int pli_array_n_dims(PyObject *array);
Py_ssize_t pli_array_size(PyObject *array, int dim);

/* A tuple of plain arrays as one, along `dim`; those without dimensions make a vector.
 */
PyObject *pli_array_join(PyObject *arrays, int dim);

#endif
