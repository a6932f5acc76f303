/* tree.c - paceline._native.Tree: paths, the way back, life. */
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
    return path_below(self->nodes, leaf, PyUnicode_FromString(""));
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
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tree_slots[] = {
    {Py_tp_dealloc, tree_dealloc},
    {Py_tp_traverse, tree_traverse},
    {Py_tp_methods, tree_methods},
    {Py_tp_doc, "The nesting of a value; made by flatten()."},
    {0, NULL},
};

PyType_Spec pli_tree_spec = {
    .name = "paceline._native.Tree",
    .basicsize = sizeof(pli_tree),
    .itemsize = sizeof(pli_node),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = tree_slots,
};
