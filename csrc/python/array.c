/* array.c - calls NumPy's C interface. */
#include "array.h"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#include <numpy/arrayobject.h>

int pli_array_check(PyObject *value)
{
    if (PyArray_API == NULL) {
        PyObject *modules = PyImport_GetModuleDict();
        PyObject *numpy = PyDict_GetItemString(modules, "numpy"); /* borrowed */
        if (numpy == NULL || numpy == Py_None)
            return 0; /* None: the program forbids its import */
        if (PyArray_ImportNumPyAPI() != 0)
            return -1;
    }
    return PyArray_Check(value);
}

int pli_array_n_dims(PyObject *array)
{
    return PyArray_NDIM((PyArrayObject *)array);
}

Py_ssize_t pli_array_size(PyObject *array, int dim)
{
    return PyArray_DIM((PyArrayObject *)array, dim);
}
