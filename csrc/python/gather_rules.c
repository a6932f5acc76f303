/* gather_rules.c - what outputs are, and how errors speak of them. */
#include "gather.h"

PyObject *pli_step_path(const step *at)
{
    if (at == NULL)
        return PyUnicode_FromString("output");
    PyObject *path = NULL;
    PyObject *before = pli_step_path(at->parent);
    PyObject *last = before != NULL ? pli_node_step(at->node, at->child) : NULL;
    if (last != NULL)
        path = PyUnicode_Concat(before, last);
    Py_XDECREF(before);
    Py_XDECREF(last);
    return path;
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
    PyObject *path = pli_step_path(at);
    if (path != NULL)
        PyErr_Format(PyExc_TypeError,
                     "gather: %U is %s%.200s on replica 0 and %s%.200s on replica %zd: "
                     "return the same from each replica, or override gather",
                     path, first == Py_None ? "" : "of type ",
                     first == Py_None ? "None" : Py_TYPE(first)->tp_name,
                     other == Py_None ? "" : "of type ",
                     other == Py_None ? "None" : Py_TYPE(other)->tp_name, k);
    Py_XDECREF(path);
    return -1;
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

/* Looks at the leaves of one list: has it any, and have all `n_rows` rows? */
static int look_at_rows(const joiner *self, PyObject *list, Py_ssize_t n_rows,
                        int *has_leaves, int *all_have_rows)
{
    pli_walk walk;
    pli_shape shape;
    int status = pli_walk_begin(&walk, self->state, 0);
    if (status == 0)
        status = pli_walk_value(&walk, list);
    for (Py_ssize_t i = 0; status == 0 && i < PyList_GET_SIZE(walk.leaves); i++) {
        status = pli_leaf_shape(self->state, PyList_GET_ITEM(walk.leaves, i), &shape);
        if (status != 0)
            break;
        const int dim = pli_shape_dim(&shape, self->dim);
        *has_leaves = 1;
        if (dim < 0 || shape.sizes[dim] != n_rows)
            *all_have_rows = 0;
    }
    pli_walk_drop(&walk);
    return status;
}

int pli_lists_are_by_row(const joiner *self, PyObject *lists)
{
    int has_leaves = 0, all_have_rows = 1, is_same_length = 1;
    if (PyTuple_GET_SIZE(self->sizes) != self->n)
        return 0;
    const Py_ssize_t length = PyList_GET_SIZE(PyTuple_GET_ITEM(lists, 0));
    for (Py_ssize_t k = 0; k < self->n; k++) {
        PyObject *list = PyTuple_GET_ITEM(lists, k);
        const Py_ssize_t n_rows = PyLong_AsSsize_t(PyTuple_GET_ITEM(self->sizes, k));
        if (n_rows == -1 && PyErr_Occurred())
            return -1;
        if (PyList_GET_SIZE(list) != n_rows)
            return 0;
        if (look_at_rows(self, list, n_rows, &has_leaves, &all_have_rows) != 0)
            return -1;
        is_same_length = is_same_length && n_rows == length;
    }
    return !is_same_length || !(has_leaves && all_have_rows);
}
