#include "kept.h"

static int is_same_name(PyObject *name, PyObject *expected)
{
    return name == expected ||
           (PyUnicode_Check(name) && PyUnicode_Compare(name, expected) == 0);
}

/* Runs no code of the user's: names are compared as strings, values by identity, but
 * for values that may be `any`. */
static int is_as(PyObject *dict, PyObject *names, PyObject *values, PyObject *any)
{
    Py_ssize_t at = 0, i = 0;
    PyObject *name, *value;
    if (PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(names))
        return 0;
    while (PyDict_Next(dict, &at, &name, &value)) {
        PyObject *const held = values != NULL ? PyTuple_GET_ITEM(values, i) : any;
        if (!is_same_name(name, PyTuple_GET_ITEM(names, i)) ||
            (held != any && value != held))
            return 0;
        i++;
    }
    return 1;
}

static int check(PyObject *dicts, PyObject *names, PyObject *values)
{
    const Py_ssize_t n = PyList_GET_SIZE(dicts);
    int is_right =
        PyList_GET_SIZE(names) == n &&
        (values == Py_None || (PyList_Check(values) && PyList_GET_SIZE(values) == n));
    for (Py_ssize_t i = 0; i < n && is_right; i++) {
        PyObject *const of = PyList_GET_ITEM(names, i);
        PyObject *const held = values == Py_None ? of : PyList_GET_ITEM(values, i);
        is_right = PyDict_Check(PyList_GET_ITEM(dicts, i)) && PyTuple_Check(of) &&
                   PyTuple_Check(held) &&
                   PyTuple_GET_SIZE(of) == PyTuple_GET_SIZE(held);
        for (Py_ssize_t j = 0; is_right && j < PyTuple_GET_SIZE(of); j++)
            is_right = PyUnicode_Check(PyTuple_GET_ITEM(of, j));
    }
    if (!is_right)
        PyErr_SetString(PyExc_TypeError,
                        "give lists of dicts, of tuples of names, and of tuples of as "
                        "many values or None");
    return is_right ? 0 : -1;
}

static int put_all(PyObject *dict, PyObject *names, PyObject *values)
{
    if (!is_as(dict, names, NULL, NULL))
        PyDict_Clear(dict);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++)
        if (PyDict_SetItem(dict, PyTuple_GET_ITEM(names, i),
                           PyTuple_GET_ITEM(values, i)) != 0)
            return -1;
    return 0;
}

PyObject *pli_restore(PyObject *module, PyObject *args)
{
    PyObject *dicts, *names, *values;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!:restore", &PyList_Type, &dicts, &PyList_Type,
                          &names, &PyList_Type, &values) ||
        check(dicts, names, values) != 0)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts); i++) {
        PyObject *const dict = PyList_GET_ITEM(dicts, i);
        PyObject *const held = PyList_GET_ITEM(values, i);
        if (!is_as(dict, PyList_GET_ITEM(names, i), held, NULL) &&
            put_all(dict, PyList_GET_ITEM(names, i), held) != 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *pli_differing(PyObject *module, PyObject *args)
{
    PyObject *dicts, *names, *values, *any;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!OO:differing", &PyList_Type, &dicts, &PyList_Type,
                          &names, &values, &any) ||
        check(dicts, names, values) != 0)
        return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(dicts); i++) {
        PyObject *const held = values == Py_None ? NULL : PyList_GET_ITEM(values, i);
        if (is_as(PyList_GET_ITEM(dicts, i), PyList_GET_ITEM(names, i), held, any))
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
    if (!PyList_Check(objects)) {
        PyErr_SetString(PyExc_TypeError, "objects is no list");
        return NULL;
    }
    PyObject *counts = PyTuple_New(PyList_GET_SIZE(objects));
    for (Py_ssize_t i = 0; counts != NULL && i < PyList_GET_SIZE(objects); i++)
        pli_tuple_put(&counts, i,
                      PyLong_FromSsize_t(Py_REFCNT(PyList_GET_ITEM(objects, i))));
    return counts;
}
