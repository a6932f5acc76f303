/* object.h - helpers for Python objects that many files use. */
#ifndef PLI_OBJECT_H
#define PLI_OBJECT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* Puts `item`, which it steals, into a new tuple; if it is NULL, drops the tuple. */
static inline void pli_tuple_put(PyObject **tuple, Py_ssize_t i, PyObject *item)
{
    if (item == NULL)
        Py_CLEAR(*tuple);
    else
        PyTuple_SET_ITEM(*tuple, i, item);
}

/* The same for a new list. */
static inline void pli_list_put(PyObject **list, Py_ssize_t i, PyObject *item)
{
    if (item == NULL)
        Py_CLEAR(*list);
    else
        PyList_SET_ITEM(*list, i, item);
}

/* 1 if `answer`, which it steals, is true, 0 if not; -1 if it is NULL or fails. */
static inline int pli_is_true(PyObject *answer)
{
    const int is_so = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return is_so;
}

/* Drops `result`; 0, or -1 if it is NULL. */
static inline int pli_drop(PyObject *result)
{
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

/* None if `status` is 0, else NULL: for functions that return int. */
static inline PyObject *pli_none(int status)
{
    return status == 0 ? Py_NewRef(Py_None) : NULL;
}

/* The spec of an immutable heap type; define <name>_object and <name>_slots first. */
#define PLI_TYPE(field, type, more_flags)                                              \
    PyType_Spec pli_##field##_spec = {                                                 \
        .name = "paceline._native." #type,                                             \
        .basicsize = sizeof(field##_object),                                           \
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | (more_flags),         \
        .slots = field##_slots,                                                        \
    }

/* The end of a heap type's dealloc. */
static inline void pli_object_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

#endif
