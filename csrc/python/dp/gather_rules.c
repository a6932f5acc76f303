/* gather_rules.c - what outputs are, and how errors speak of them. */
#include "gather.h"

static PyObject *path_of(const step *at) /* NOLINT(misc-no-recursion) */
{
    if (at == NULL)
        return PyUnicode_FromString("gather: output");
    PyObject *path = NULL;
    PyObject *before = path_of(at->parent);
    PyObject *last = before != NULL ? pli_node_step(at->node, at->child) : NULL;
    if (last != NULL)
        path = PyUnicode_Concat(before, last);
    Py_XDECREF(before);
    Py_XDECREF(last);
    return path;
}

int pli_refuse_output(PyObject *type, const step *at, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    pli_raise_at(type, path_of(at), format, args);
    va_end(args);
    return -1;
}

/* ---- kinds ---------------------------------------------------------------------- */

/* None says "nothing": it is not one constant among others. */
static int is_none_in_one(PyObject *left, PyObject *right)
{
    return (left == Py_None) != (right == Py_None);
}

static int refuse_types(const step *at, PyObject *values, Py_ssize_t k)
{
    PyObject *first = PyTuple_GET_ITEM(values, 0);
    PyObject *other = PyTuple_GET_ITEM(values, k);
    return pli_refuse_output(
        PyExc_TypeError, at,
        "is %s%.200s on replica 0 and %s%.200s on replica %zd: return the same from "
        "each replica, or override gather",
        first == Py_None ? "" : "of type ",
        first == Py_None ? "None" : Py_TYPE(first)->tp_name,
        other == Py_None ? "" : "of type ",
        other == Py_None ? "None" : Py_TYPE(other)->tp_name, k);
}

static int kind_of_output(const module_state *state, PyObject *value)
{
    const int kind = pli_kind_of(state, value);
    /* A shape is one thing: an entry of it cannot become a list of entries. */
    const int is_size = (PyObject *)Py_TYPE(value) == state->size_type;
    return kind == PLI_MARKER || is_size ? PLI_CONSTANT : kind;
}

int pli_outputs_kind(const joiner *self, PyObject *values, const step *at, int *kind)
{
    PyObject *first = PyTuple_GET_ITEM(values, 0);
    *kind = kind_of_output(self->state, first);
    if (*kind < 0)
        return -1;
    for (Py_ssize_t k = 1; k < self->n; k++) {
        PyObject *other = PyTuple_GET_ITEM(values, k);
        const int other_kind = kind_of_output(self->state, other);
        if (other_kind < 0)
            return -1;
        const int is_same = *kind == other_kind &&
                            (*kind <= PLI_CONSTANT || Py_TYPE(first) == Py_TYPE(other));
        if (!is_same || is_none_in_one(first, other))
            return refuse_types(at, values, k);
    }
    return 0;
}

/* ---- lists of rows -------------------------------------------------------------- */

/* Looks into one list: is there a tensor or an array, is there a plain value? */
static int search_list(const joiner *self, PyObject *list, int *has_leaf,
                       int *has_value)
{
    pli_walk walk;
    int status = pli_walk_begin(&walk, self->state, 0);
    if (status == 0)
        status = pli_walk_value(&walk, list);
    if (status == 0) {
        *has_leaf |= PyList_GET_SIZE(walk.leaves) > 0;
        for (Py_ssize_t i = 0; i < walk.n_nodes; i++)
            *has_value |=
                walk.nodes[i].kind == PLI_CONSTANT && walk.nodes[i].extra != Py_None;
    }
    pli_walk_drop(&walk);
    return status;
}

/* Where the rows are known, each replica's list must have an entry for each of its. */
static int check_rows(const joiner *self, PyObject *lists, const step *at)
{
    if (PyTuple_GET_SIZE(self->sizes) != self->n || self->n == 1)
        return 0;
    for (Py_ssize_t k = 0; k < self->n; k++) {
        const Py_ssize_t n = PySequence_Size(PyTuple_GET_ITEM(lists, k));
        const Py_ssize_t n_rows = PyLong_AsSsize_t(PyTuple_GET_ITEM(self->sizes, k));
        if (PyErr_Occurred())
            return -1;
        if (n != n_rows)
            return pli_refuse_output(
                PyExc_ValueError, at,
                "has %zd entries for the %zd rows of replica %zd: a list of numbers, "
                "strings or objects has one entry a row; return a tuple where they are "
                "something else, or override gather",
                n, n_rows, k);
    }
    return 0;
}

int pli_lists_are_by_row(const joiner *self, PyObject *lists, const step *at)
{
    int has_leaf = 0, has_value = 0;
    for (Py_ssize_t k = 0; k < self->n; k++)
        if (search_list(self, PyTuple_GET_ITEM(lists, k), &has_leaf, &has_value) != 0)
            return -1;
    if (has_leaf || !has_value)
        return 0;
    return check_rows(self, lists, at) == 0 ? 1 : -1;
}
