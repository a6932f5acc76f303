/* gather.c - the replicas' outputs as one.
 *
 * The outputs are walked side by side; replica 0's says what each part is.
 *
 *     replica 0: {"logits": (2, 5), "n": 2}
 *     replica 1: {"logits": (1, 5), "n": 1}      ->  {"logits": (3, 5), "n": [2, 1]}
 */
#include "gather.h"

#include "python/array.h"

static PyObject *join(const joiner *self, PyObject *values, const step *at);

/* ---- tensors and arrays --------------------------------------------------------- */

static int refuse_shapes(const step *at, Py_ssize_t k, const pli_shape *first,
                         const pli_shape *other, Py_ssize_t dim)
{
    PyObject *first_text = pli_shape_text(first);
    PyObject *other_text = pli_shape_text(other);
    if (first_text == NULL || other_text == NULL)
        ;
    else if (first->n_dims == other->n_dims && pli_shape_dim(first, dim) < 0)
        (void)pli_refuse_output(PyExc_ValueError, at,
                                "has shape %U on replica 0, and no dimension %zd to "
                                "join along: override gather to say what it shall "
                                "become",
                                first_text, dim);
    else
        (void)pli_refuse_output(PyExc_ValueError, at,
                                "has shape %U on replica 0 and %U on replica %zd: only "
                                "dimension %zd may differ; pad them to one size in the "
                                "module, or override gather",
                                first_text, other_text, k, dim);
    Py_XDECREF(first_text);
    Py_XDECREF(other_text);
    return -1;
}

/* Fills *first with replica 0's shape; -1 where they cannot be joined. */
static int check_shapes(const joiner *self, PyObject *values, const step *at,
                        pli_shape *first)
{
    pli_shape other;
    if (pli_leaf_shape(self->state, PyTuple_GET_ITEM(values, 0), first) != 0)
        return -1;
    if (self->n == 1)
        return 0;
    if (first->n_dims == PLI_SHAPE_UNKNOWN) {
        (void)pli_refuse_output(PyExc_ValueError, at,
                                "is a nested tensor, which has no shape to join by: "
                                "return its rows as tensors of one shape, or override "
                                "gather");
        return -1;
    }
    const int dim = pli_shape_dim(first, self->dim);
    if (dim < 0 && first->n_dims > 0)
        return refuse_shapes(at, 0, first, first, self->dim);
    for (Py_ssize_t k = 1; k < self->n; k++) {
        if (pli_leaf_shape(self->state, PyTuple_GET_ITEM(values, k), &other) != 0)
            return -1;
        if (!pli_shape_joins(first, &other, dim))
            return refuse_shapes(at, k, first, &other, self->dim);
    }
    return 0;
}

static int warn_of_scalars(const joiner *self)
{
    if (*self->has_warned)
        return 0;
    *self->has_warned = 1;
    return PyErr_WarnEx(PyExc_UserWarning,
                        "Was asked to gather along dimension 0, but all input tensors "
                        "were scalars; will instead unsqueeze and return a vector.",
                        1);
}

static PyObject *join_tensors(const joiner *self, PyObject *values, const step *at)
{
    pli_shape shape;
    if (check_shapes(self, values, at, &shape) != 0)
        return NULL;
    if (shape.n_dims != 0 && self->n == 1 && self->join == NULL)
        return Py_NewRef(PyTuple_GET_ITEM(values, 0));
    if (shape.n_dims == 0 && warn_of_scalars(self) != 0)
        return NULL;
    PyObject *args[] = {values, shape.n_dims > 0 ? self->dim_object : Py_None};
    if (self->join != NULL)
        return PyObject_Vectorcall(self->join, args, 2, NULL);
    return shape.n_dims > 0 ? PyObject_Vectorcall(self->state->cat, args, 2, NULL)
                            : PyObject_CallOneArg(self->state->stack, values);
}

static PyObject *join_arrays(const joiner *self, PyObject *values, const step *at)
{
    pli_shape shape;
    if (check_shapes(self, values, at, &shape) != 0)
        return NULL;
    const int dim = shape.n_dims > 0 ? pli_shape_dim(&shape, self->dim) : 0;
    if (shape.n_dims > 0 && self->n == 1)
        return Py_NewRef(PyTuple_GET_ITEM(values, 0));
    for (Py_ssize_t k = 0; k < self->n; k++)
        if (!pli_array_is_plain(PyTuple_GET_ITEM(values, k)))
            return PyObject_CallFunction(self->state->join_arrays, "Oi", values, dim);
    return pli_array_join(values, dim);
}

/* ---- containers ----------------------------------------------------------------- */

/* What the replicas' containers hold, opened: `n` of each. */
typedef struct opened {
    pli_node *nodes;
    PyObject **children; /* tuples */
    Py_ssize_t n;
} opened;

static int open_all(const joiner *self, PyObject *values, pli_kind kind, opened *out)
{
    out->n = 0;
    out->nodes = PyMem_Calloc((size_t)self->n, sizeof *out->nodes);
    out->children = PyMem_Calloc((size_t)self->n, sizeof(PyObject *));
    if (out->nodes == NULL || out->children == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; out->n < self->n; out->n++) {
        PyObject *value = PyTuple_GET_ITEM(values, out->n);
        out->children[out->n] = pli_open(self->state, value, kind, &out->nodes[out->n]);
        if (out->children[out->n] == NULL)
            return -1;
    }
    return 0;
}

static void drop_all(const opened *parts)
{
    for (Py_ssize_t k = 0; k < parts->n; k++) {
        pli_node_drop(&parts->nodes[k]);
        Py_DECREF(parts->children[k]);
    }
    PyMem_Free(parts->nodes);
    PyMem_Free(parts->children);
}

static int refuse_keys(const step *at, const opened *parts, Py_ssize_t k)
{
    PyObject *first_keys = PySequence_List(parts->nodes[0].keys);
    PyObject *other_keys = PySequence_List(parts->nodes[k].keys);
    if (first_keys != NULL && other_keys != NULL)
        (void)pli_refuse_output(PyExc_ValueError, at,
                                "has the keys %R on replica 0 and %R on replica %zd: "
                                "return the same keys from each replica, or override "
                                "gather",
                                first_keys, other_keys, k);
    Py_XDECREF(first_keys);
    Py_XDECREF(other_keys);
    return -1;
}

/* Brings replica k's children into the order of replica 0's keys. */
static int order_by_keys(const step *at, const opened *parts, Py_ssize_t k)
{
    PyObject *wanted = parts->nodes[0].keys, *keys = parts->nodes[k].keys;
    const int same = PyObject_RichCompareBool(wanted, keys, Py_EQ);
    if (same != 0)
        return same < 0 ? -1 : 0;
    const Py_ssize_t n = PyTuple_GET_SIZE(wanted);
    if (PyTuple_GET_SIZE(keys) != n)
        return refuse_keys(at, parts, k);
    PyObject *table = PyDict_New();
    PyObject *ordered = PyTuple_New(n);
    int status = table != NULL && ordered != NULL ? 0 : -1;
    for (Py_ssize_t i = 0; status == 0 && i < n; i++)
        status = PyDict_SetItem(table, PyTuple_GET_ITEM(keys, i),
                                PyTuple_GET_ITEM(parts->children[k], i));
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        PyObject *child = PyDict_GetItemWithError(table, PyTuple_GET_ITEM(wanted, i));
        if (child == NULL)
            status = PyErr_Occurred() ? -1 : refuse_keys(at, parts, k);
        else
            PyTuple_SET_ITEM(ordered, i, Py_NewRef(child));
    }
    if (status == 0) {
        Py_SETREF(parts->children[k], ordered);
        ordered = NULL;
    }
    Py_XDECREF(ordered);
    Py_XDECREF(table);
    return status;
}

static int check_part(const step *at, const opened *parts, Py_ssize_t k)
{
    const pli_node *first = &parts->nodes[0], *other = &parts->nodes[k];
    if (first->kind == PLI_REGISTERED) {
        const int same = PyObject_RichCompareBool(first->extra, other->extra, Py_EQ);
        if (same == 0)
            return pli_refuse_output(
                PyExc_ValueError, at,
                "is a %.200s with the context %R on replica 0 and %R on replica %zd: "
                "return the same from each replica, or override gather",
                first->type->tp_name, first->extra, other->extra, k);
        if (same < 0)
            return -1;
    } else if (first->keys != NULL && order_by_keys(at, parts, k) != 0) {
        return -1;
    }
    if (first->n_children == other->n_children)
        return 0;
    return pli_refuse_output(PyExc_ValueError, at,
                             "has %zd entries on replica 0 and %zd on replica %zd: "
                             "return as many from each replica, or override gather",
                             first->n_children, other->n_children, k);
}

static PyObject *join_children(const joiner *self, const opened *parts, const step *at)
{
    const pli_node *first = &parts->nodes[0];
    PyObject *items = PyTuple_New(first->n_children);
    for (Py_ssize_t i = 0; items != NULL && i < first->n_children; i++) {
        const step below = {.parent = at, .node = first, .child = i};
        PyObject *column = PyTuple_New(self->n);
        for (Py_ssize_t k = 0; column != NULL && k < self->n; k++)
            PyTuple_SET_ITEM(column, k,
                             Py_NewRef(PyTuple_GET_ITEM(parts->children[k], i)));
        pli_tuple_put(&items, i, column != NULL ? join(self, column, &below) : NULL);
        Py_XDECREF(column);
    }
    return items;
}

/* Lists with one entry a row, one behind the other. */
static PyObject *chain(const opened *parts)
{
    PyObject *all = PyList_New(0);
    for (Py_ssize_t k = 0; all != NULL && k < parts->n; k++) {
        const Py_ssize_t end = PyList_GET_SIZE(all);
        if (PyList_SetSlice(all, end, end, parts->children[k]) != 0)
            Py_CLEAR(all);
    }
    PyObject *items = all != NULL ? PyList_AsTuple(all) : NULL;
    Py_XDECREF(all);
    return items;
}

static PyObject *join_opened(const joiner *self, PyObject *values, const step *at,
                             const opened *parts)
{
    const pli_kind kind = parts->nodes[0].kind;
    int is_chain = 0;
    if (kind == PLI_LIST || kind == PLI_LIST_LIKE)
        is_chain = pli_lists_are_by_row(self, values, at);
    if (is_chain < 0)
        return NULL;
    for (Py_ssize_t k = 1; !is_chain && k < self->n; k++)
        if (check_part(at, parts, k) != 0)
            return NULL;
    PyObject *items = is_chain ? chain(parts) : join_children(self, parts, at);
    return items != NULL ? pli_close(self->state, &parts->nodes[0], items) : NULL;
}

static PyObject *join_containers(const joiner *self, PyObject *values, pli_kind kind,
                                 const step *at)
{
    opened parts;
    PyObject *result = NULL;
    if (Py_EnterRecursiveCall(" while outputs are gathered"))
        return NULL;
    if (open_all(self, values, kind, &parts) == 0)
        result = join_opened(self, values, at, &parts);
    drop_all(&parts);
    Py_LeaveRecursiveCall();
    return result;
}

/* ---- any ------------------------------------------------------------------------ */

static PyObject *join(const joiner *self, PyObject *values, const step *at)
{
    int kind = 0;
    if (pli_outputs_kind(self, values, at, &kind) != 0)
        return NULL;
    switch (kind) {
    case PLI_TENSOR:
        return join_tensors(self, values, at);
    case PLI_ARRAY:
        return join_arrays(self, values, at);
    case PLI_CONSTANT:
        return PyTuple_GET_ITEM(values, 0) == Py_None ? Py_NewRef(Py_None)
                                                      : PySequence_List(values);
    case PLI_PACKED:
        return self->join != NULL
                   ? PyObject_CallMethod(self->join, "packed", "(O)", values)
                   : PyObject_CallOneArg(self->state->join_packed, values);
    default:
        return join_containers(self, values, (pli_kind)kind, at);
    }
}

static PyObject *gather_outputs(const module_state *state, PyObject *values,
                                PyObject *sizes, PyObject *dim, PyObject *join_object)
{
    int has_warned = 0;
    const joiner self = {
        .state = state,
        .n = PyTuple_GET_SIZE(values),
        .sizes = sizes,
        .dim = PyLong_AsSsize_t(dim),
        .dim_object = dim,
        .join = join_object != Py_None ? join_object : NULL,
        .has_warned = &has_warned,
    };
    return PyErr_Occurred() ? NULL : join(&self, values, NULL);
}

PyObject *pli_gather(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    if (n_args < 3 || n_args > 4 || !PyTuple_Check(args[1]) || !PyLong_Check(args[2])) {
        PyErr_SetString(
            PyExc_TypeError,
            "gather(outputs: list, sizes: tuple of int, dim: int, join=None)");
        return NULL;
    }
    if (pli_needs_torch(state) != 0)
        return NULL;
    PyObject *result = NULL;
    PyObject *values = PySequence_Tuple(args[0]);
    if (values == NULL)
        return NULL;
    if (PyTuple_GET_SIZE(values) == 0)
        PyErr_SetString(PyExc_ValueError, "gather: no output at all");
    else
        result = gather_outputs(state, values, args[1], args[2],
                                n_args > 3 ? args[3] : Py_None);
    Py_DECREF(values);
    return result;
}
