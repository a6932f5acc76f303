/* kept.c - checks and restores the dictionaries of kept modules. */
#include "tree.h"

static int is_same_name(PyObject *name, PyObject *expected)
{
    return name == expected || (PyUnicode_Check(name) && PyUnicode_Check(expected) &&
                                PyUnicode_Compare(name, expected) == 0);
}

/* Runs no user code: names are compared as strings, values by identity.  A value may be
 * anything if the expected one is `any`; if `any` is NULL, only names are compared. */
static int is_as(PyObject *dict, PyObject *expected, PyObject *any)
{
    Py_ssize_t at = 0, at_expected = 0;
    PyObject *name, *value, *expected_name, *held;
    if (PyDict_GET_SIZE(dict) != PyDict_GET_SIZE(expected))
        return 0;
    while (PyDict_Next(dict, &at, &name, &value) &&
           PyDict_Next(expected, &at_expected, &expected_name, &held))
        if (!is_same_name(name, expected_name) ||
            (any != NULL && held != any && value != held))
            return 0;
    return 1;
}

static int check(PyObject *dicts, PyObject *expected)
{
    int is_right = PyList_Check(dicts) && PyList_Check(expected) &&
                   PyList_GET_SIZE(dicts) == PyList_GET_SIZE(expected);
    for (Py_ssize_t i = 0; is_right && i < PyList_GET_SIZE(dicts); i++)
        is_right = PyDict_Check(PyList_GET_ITEM(dicts, i)) &&
                   PyDict_Check(PyList_GET_ITEM(expected, i));
    if (!is_right)
        PyErr_SetString(PyExc_TypeError, "give two lists of dicts, equally long");
    return is_right ? 0 : -1;
}

PyObject *pli_restore(PyObject *module, PyObject *args)
{
    PyObject *dicts, *expected;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:restore", &dicts, &expected) ||
        check(dicts, expected) != 0)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts); i++) {
        PyObject *const dict = PyList_GET_ITEM(dicts, i);
        PyObject *const held = PyList_GET_ITEM(expected, i);
        if (!is_as(dict, held, NULL))
            PyDict_Clear(dict);
        if (PyDict_Update(dict, held) != 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *pli_differing(PyObject *module, PyObject *args)
{
    PyObject *dicts, *expected, *any;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO:differing", &dicts, &expected, &any) ||
        check(dicts, expected) != 0)
        return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(dicts); i++) {
        if (is_as(PyList_GET_ITEM(dicts, i), PyList_GET_ITEM(expected, i), any))
            continue;
        PyObject *number = PyLong_FromSsize_t(i);
        if (number == NULL || PyList_Append(found, number) != 0)
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    return found;
}

PyObject *pli_reference_counts(PyObject *module, PyObject *objects)
{
    (void)module;
    if (!PyList_Check(objects))
        return PyErr_Format(PyExc_TypeError, "objects is not a list");
    PyObject *counts = PyTuple_New(PyList_GET_SIZE(objects));
    for (Py_ssize_t i = 0; counts != NULL && i < PyList_GET_SIZE(objects); i++)
        pli_tuple_put(&counts, i,
                      PyLong_FromSsize_t(Py_REFCNT(PyList_GET_ITEM(objects, i))));
    return counts;
}
