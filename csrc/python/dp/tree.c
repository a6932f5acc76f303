/* tree.c - paceline._native.Tree: paths, equality, pickles, life.
 *
 * Two trees are equal where a worker that has one needs not be sent the other.  So a
 * constant counts as equal only where it cannot have changed since it was seen.
 */
#include "tree.h"

#include <string.h>

/* ---- construction --------------------------------------------------------------- */

pli_tree *pli_tree_new(const module_state *state, pli_walk *walk)
{
    PyTypeObject *type = state->tree_type;
    pli_tree *self = (pli_tree *)type->tp_alloc(type, walk->n_nodes);
    if (self == NULL)
        return NULL;
    memcpy(self->nodes, walk->nodes, (size_t)walk->n_nodes * sizeof(pli_node));
    self->n_leaves = PyList_GET_SIZE(walk->leaves);
    walk->n_nodes = 0;
    return self;
}

static PyObject *unless_none(PyObject *object)
{
    return object != Py_None ? Py_NewRef(object) : NULL;
}

/* One node of a pickle, checked as far as reading it safely needs. */
static int read_node(PyObject *row, pli_node *out)
{
    int kind;
    Py_ssize_t n;
    PyObject *type, *keys, *extra, *attributes;
    if (!PyArg_ParseTuple(row, "inOOOO", &kind, &n, &type, &keys, &extra, &attributes))
        return -1;
    const int is_container = kind > PLI_CONSTANT && kind < PLI_MARKER;
    const int has_keys =
        kind == PLI_DICT ||
        (kind >= PLI_NAMED && kind < PLI_REGISTERED && kind != PLI_LIST_LIKE);
    if (kind < 0 || kind >= PLI_MARKER || n < 0 || (!is_container && n != 0) ||
        (is_container && !PyType_Check(type)) ||
        (kind == PLI_REGISTERED && !PyCallable_Check(keys)) ||
        (has_keys && (!PyTuple_Check(keys) || PyTuple_GET_SIZE(keys) != n)) ||
        (attributes != Py_None && attributes != Py_Ellipsis &&
         !PyDict_Check(attributes))) {
        PyErr_Format(PyExc_ValueError, "Tree: %R is no node", row);
        return -1;
    }
    const int keeps_none = kind == PLI_CONSTANT || kind == PLI_REGISTERED;
    *out = (pli_node){
        .kind = (pli_kind)kind,
        .n_children = n,
        .type = (PyTypeObject *)unless_none(type),
        .keys = unless_none(keys),
        .extra = keeps_none ? Py_NewRef(extra) : unless_none(extra),
        .attributes = unless_none(attributes),
    };
    return 0;
}

/* Tree(rows): what a pickle calls. */
static PyObject *tree_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"rows", NULL};
    PyObject *rows;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Tree", names, &PyTuple_Type,
                                     &rows))
        return NULL;
    const Py_ssize_t n = PyTuple_GET_SIZE(rows);
    pli_tree *self = (pli_tree *)type->tp_alloc(type, n);
    if (self == NULL)
        return NULL;
    Py_ssize_t n_due = 1; /* nodes that the ones so far still need */
    for (Py_ssize_t i = 0; i < n && n_due > 0; i++) {
        PyObject *row = PyTuple_GET_ITEM(rows, i);
        if (!PyTuple_Check(row) || read_node(row, &self->nodes[i]) != 0) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_TypeError, "Tree: %R is no node", row);
            Py_DECREF((PyObject *)self);
            return NULL;
        }
        self->n_leaves += self->nodes[i].kind < PLI_CONSTANT;
        n_due += self->nodes[i].n_children - 1;
        if (n_due == 0 && i + 1 < n)
            n_due = -1;
    }
    if (n_due != 0) {
        PyErr_SetString(PyExc_ValueError, "Tree: the nodes do not make one tree");
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static PyObject *or_none(void *object)
{
    return object != NULL ? (PyObject *)object : Py_None;
}

static PyObject *tree_reduce(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const pli_tree *self = (const pli_tree *)object;
    (void)ignored;
    PyObject *rows = PyTuple_New(Py_SIZE(object));
    for (Py_ssize_t i = 0; rows != NULL && i < Py_SIZE(object); i++) {
        const pli_node *node = &self->nodes[i];
        PyObject *row = Py_BuildValue("(inOOOO)", (int)node->kind, node->n_children,
                                      or_none(node->type), or_none(node->keys),
                                      or_none(node->extra), or_none(node->attributes));
        pli_tuple_put(&rows, i, row);
    }
    return rows != NULL ? Py_BuildValue("(O(N))", (PyObject *)Py_TYPE(object), rows)
                        : NULL;
}

/* ---- paths ---------------------------------------------------------------------- */

PyObject *pli_node_step(const pli_node *node, Py_ssize_t child)
{
    switch (node->kind) {
    case PLI_DICT:
    case PLI_DICT_LIKE:
    case PLI_OUTPUT:
        return PyUnicode_FromFormat("[%R]", PyTuple_GET_ITEM(node->keys, child));
    case PLI_NAMED:
    case PLI_PACKED:
    case PLI_ATTRIBUTES:
        return PyUnicode_FromFormat(".%S", PyTuple_GET_ITEM(node->keys, child));
    default:
        return PyUnicode_FromFormat("[%zd]", child);
    }
}

/* The node behind the last descendant of `node`; counts the leaves that it passes. */
static const pli_node *after(const pli_node *node, Py_ssize_t *n_leaves)
{
    for (Py_ssize_t n_due = 1; n_due > 0; node++) {
        *n_leaves += node->kind < PLI_CONSTANT;
        n_due += node->n_children - 1;
    }
    return node;
}

/* Goes down from *node to the child that holds the leaf, *to_go leaves further on;
 * returns the child's number. */
static Py_ssize_t descend(const pli_node **node, Py_ssize_t *to_go)
{
    const pli_node *child = *node + 1;
    for (Py_ssize_t i = 0;; i++) {
        Py_ssize_t n_leaves = 0;
        const pli_node *next = after(child, &n_leaves);
        if (*to_go < n_leaves) {
            *node = child;
            return i;
        }
        *to_go -= n_leaves;
        child = next;
    }
}

static PyObject *path_below(const pli_node *node, Py_ssize_t to_go, PyObject *path)
{
    while (path != NULL && node->kind > PLI_CONSTANT) {
        const pli_node *parent = node;
        PyObject *step = pli_node_step(parent, descend(&node, &to_go));
        PyObject *longer = step != NULL ? PyUnicode_Concat(path, step) : NULL;
        Py_XDECREF(step);
        Py_SETREF(path, longer);
    }
    return path;
}

PyObject *pli_tree_path(const pli_tree *tree, Py_ssize_t leaf)
{
    return path_below(tree->nodes, leaf, PyUnicode_FromString(""));
}

PyObject *pli_tree_path_of_call(const pli_tree *tree, Py_ssize_t leaf)
{
    const pli_node *node = tree->nodes;
    const Py_ssize_t child = descend(&node, &leaf);
    return path_below(node, leaf, PyUnicode_FromString(child ? "kwargs" : "args"));
}

static PyObject *tree_path(PyObject *object, PyObject *number)
{
    PLI_ENTER(object);
    const pli_tree *self = (const pli_tree *)object;
    const Py_ssize_t leaf = PyNumber_AsSsize_t(number, PyExc_IndexError);
    if (leaf == -1 && PyErr_Occurred())
        return NULL;
    if (leaf < 0 || leaf >= self->n_leaves)
        return PyErr_Format(PyExc_IndexError, "path(%zd) of a tree of %zd leaves", leaf,
                            self->n_leaves);
    return pli_tree_path(self, leaf);
}

/* ---- equality: 1, 0, or -1 ------------------------------------------------------ */

static int is_fixed(const module_state *state, PyObject *left, PyObject *right);

static int are_fixed(const module_state *state, PyObject *left, PyObject *right)
{
    int result = PyTuple_GET_SIZE(left) == PyTuple_GET_SIZE(right);
    for (Py_ssize_t i = 0; result == 1 && i < PyTuple_GET_SIZE(left); i++)
        result = is_fixed(state, PyTuple_GET_ITEM(left, i), PyTuple_GET_ITEM(right, i));
    return result;
}

/* Lists and dicts are met in the contexts of registered types, which are new at each
 * walk; one that is the same object may have been changed under both trees. */
static int lists_are_fixed(const module_state *state, PyObject *left, PyObject *right)
{
    if (left == right)
        return PyList_GET_SIZE(left) == 0;
    PyObject *first = PyList_AsTuple(left);
    PyObject *other = first != NULL ? PyList_AsTuple(right) : NULL;
    const int result = other != NULL ? are_fixed(state, first, other) : -1;
    Py_XDECREF(first);
    Py_XDECREF(other);
    return result;
}

static int dicts_are_fixed(const module_state *state, PyObject *left, PyObject *right)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    if (PyDict_GET_SIZE(left) != PyDict_GET_SIZE(right))
        return 0;
    while (PyDict_Next(left, &at, &key, &value)) {
        PyObject *other = PyDict_GetItemWithError(right, key);
        if (other == NULL)
            return PyErr_Occurred() ? -1 : 0;
        const int result = is_fixed(state, value, other);
        if (result != 1)
            return result;
    }
    return 1;
}

static int complexes_are_same(PyObject *left, PyObject *right)
{
    const Py_complex first = PyComplex_AsCComplex(left);
    const Py_complex other = PyComplex_AsCComplex(right);
    return pli_is_same_double(first.real, other.real) &&
           pli_is_same_double(first.imag, other.imag);
}

static int nested_are_fixed(const module_state *state, PyObject *left, PyObject *right)
{
    int result = -1;
    if (Py_EnterRecursiveCall(" while constants are compared"))
        return -1;
    if (PyTuple_CheckExact(left))
        result = are_fixed(state, left, right);
    else if (PyList_CheckExact(left))
        result = lists_are_fixed(state, left, right);
    else
        result = left == right ? PyDict_GET_SIZE(left) == 0
                               : dicts_are_fixed(state, left, right);
    Py_LeaveRecursiveCall();
    return result;
}

/* Are both the same constant, and one that cannot have changed? */
static int is_fixed(const module_state *state, PyObject *left, PyObject *right)
{
    PyTypeObject *type = Py_TYPE(left);
    if (left == Py_None || type == &PyBool_Type)
        return left == right;
    if (type != Py_TYPE(right))
        return 0;
    if (type == &PyLong_Type || type == &PyUnicode_Type || type == &PyBytes_Type ||
        (PyObject *)type == state->device_type)
        return PyObject_RichCompareBool(left, right, Py_EQ);
    if (type == &PyFloat_Type)
        return pli_is_same_double(PyFloat_AS_DOUBLE(left), PyFloat_AS_DOUBLE(right));
    if (type == &PyComplex_Type)
        return complexes_are_same(left, right);
    if (type == &PyTuple_Type || type == &PyList_Type || type == &PyDict_Type)
        return nested_are_fixed(state, left, right);
    return left == right ? PyObject_IsInstance(left, state->fixed_types) : 0;
}

/* Keys are hashable, so they do not change: equal and of one type is enough. */
static int keys_are_same(PyObject *left, PyObject *right)
{
    if (left == right)
        return 1;
    if (left == NULL || right == NULL || !PyTuple_Check(left) || !PyTuple_Check(right))
        return 0;
    const Py_ssize_t n = PyTuple_GET_SIZE(left);
    if (PyTuple_GET_SIZE(right) != n)
        return 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *first = PyTuple_GET_ITEM(left, i),
                 *other = PyTuple_GET_ITEM(right, i);
        if (Py_TYPE(first) != Py_TYPE(other))
            return 0;
        const int same = PyObject_RichCompareBool(first, other, Py_EQ);
        if (same != 1)
            return same;
    }
    return 1;
}

static int parts_are_fixed(const module_state *state, PyObject *left, PyObject *right)
{
    if (left == NULL || right == NULL)
        return left == right;
    /* What a tree keeps of a __dict__ is its own copy. */
    if (left == Py_Ellipsis || right == Py_Ellipsis)
        return left == right;
    return is_fixed(state, left, right);
}

static int nodes_are_same(const module_state *state, const pli_node *left,
                          const pli_node *right)
{
    if (left->kind != right->kind || left->type != right->type ||
        left->n_children != right->n_children)
        return 0;
    int result = keys_are_same(left->keys, right->keys);
    if (result == 1)
        result = parts_are_fixed(state, left->extra, right->extra);
    if (result == 1)
        result = left == right ||
                 parts_are_fixed(state, left->attributes, right->attributes);
    return result;
}

static PyObject *tree_compare(PyObject *object, PyObject *other, int op)
{
    PLI_ENTER(object);
    if (Py_TYPE(object) != Py_TYPE(other) || (op != Py_EQ && op != Py_NE))
        Py_RETURN_NOTIMPLEMENTED;
    const module_state *state = state_of(object);
    const pli_tree *left = (const pli_tree *)object, *right = (const pli_tree *)other;
    if (pli_needs_torch(state) != 0)
        return NULL;
    int result = Py_SIZE(object) == Py_SIZE(other);
    for (Py_ssize_t i = 0; result == 1 && i < Py_SIZE(object); i++)
        result = nodes_are_same(state, &left->nodes[i], &right->nodes[i]);
    return result < 0 ? NULL : PyBool_FromLong(result == (op == Py_EQ));
}

/* ---- use ------------------------------------------------------------------------ */

static PyObject *tree_unflatten(PyObject *object, PyObject *leaves)
{
    PLI_ENTER(object);
    const pli_tree *self = (const pli_tree *)object;
    PyObject *all = PySequence_Fast(leaves, "unflatten takes a sequence of leaves");
    if (all == NULL)
        return NULL;
    PyObject *value = NULL;
    if (PySequence_Fast_GET_SIZE(all) != self->n_leaves)
        PyErr_Format(PyExc_ValueError, "unflatten: %zd leaves for a tree of %zd",
                     PySequence_Fast_GET_SIZE(all), self->n_leaves);
    else
        value = pli_tree_unflatten(state_of(object), self, all);
    Py_DECREF(all);
    return value;
}

/* ---- life ----------------------------------------------------------------------- */

static int tree_traverse(PyObject *object, visitproc visit, void *arg)
{
    const pli_tree *self = (const pli_tree *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < Py_SIZE(object); i++) {
        Py_VISIT(self->nodes[i].type);
        Py_VISIT(self->nodes[i].keys);
        Py_VISIT(self->nodes[i].extra);
        Py_VISIT(self->nodes[i].attributes);
    }
    return 0;
}

/* No tp_clear: a tree is as immutable as a tuple, and its cycles go through what it
 * holds, which can be cleared. */
static void tree_dealloc(PyObject *object)
{
    pli_tree *self = (pli_tree *)object;
    PyObject_GC_UnTrack(object);
    for (Py_ssize_t i = 0; i < Py_SIZE(object); i++)
        pli_node_drop(&self->nodes[i]);
    pli_object_free(object);
}

static PyMethodDef tree_methods[] = {
    {"unflatten", tree_unflatten, METH_O,
     "unflatten($self, leaves, /)\n--\n\nReturn the value with these leaves."},
    {"path", tree_path, METH_O,
     "path($self, index, /)\n--\n\nTell where a leaf is: \"[0]['mask'].logits\"."},
    {"__reduce__", tree_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tree_slots[] = {
    {Py_tp_new, tree_new},
    {Py_tp_dealloc, tree_dealloc},
    {Py_tp_traverse, tree_traverse},
    {Py_tp_richcompare, tree_compare},
    {Py_tp_methods, tree_methods},
    {Py_tp_doc, "Tree(rows)\n--\n\nThe nesting of a value; made by flatten()."},
    {0, NULL},
};

PyType_Spec pli_tree_spec = {
    .name = "paceline._native.Tree",
    .basicsize = sizeof(pli_tree),
    .itemsize = sizeof(pli_node),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tree_slots,
};
