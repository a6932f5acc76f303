/* tree_walk.c - the walk from a value to its tree and its leaves. */
#include "tree.h"

#include <string.h>

int pli_walk_begin(pli_walk *walk, const module_state *state, int wants_ways)
{
    walk->state = state;
    walk->nodes = walk->few_nodes;
    walk->n_nodes = 0;
    walk->n_nodes_allocated =
        (Py_ssize_t)(sizeof walk->few_nodes / sizeof walk->few_nodes[0]);
    walk->packs = NULL;
    walk->ways = NULL;
    walk->n_ways_allocated = 0;
    walk->n_markers = walk->n_whole = walk->n_packs = 0;
    walk->leaves = PyList_New(0);
    if (walk->leaves == NULL)
        return -1;
    if (wants_ways) {
        walk->n_ways_allocated = 16;
        walk->ways = PyMem_Malloc((size_t)walk->n_ways_allocated);
        if (walk->ways == NULL)
            PyErr_NoMemory();
    }
    return wants_ways && walk->ways == NULL ? -1 : 0;
}

void pli_walk_drop(pli_walk *walk)
{
    for (Py_ssize_t i = 0; i < walk->n_nodes; i++)
        pli_node_drop(&walk->nodes[i]);
    if (walk->nodes != walk->few_nodes)
        PyMem_Free(walk->nodes);
    PyMem_Free(walk->ways);
    Py_XDECREF(walk->leaves);
    Py_XDECREF(walk->packs);
}

/* Takes over what `node` owns, also on failure. */
static int push_node(pli_walk *walk, pli_node node)
{
    if (walk->n_nodes == walk->n_nodes_allocated) {
        const size_t n_bytes = 2 * (size_t)walk->n_nodes_allocated * sizeof(pli_node);
        pli_node *nodes = walk->nodes != walk->few_nodes
                              ? PyMem_Realloc(walk->nodes, n_bytes)
                              : PyMem_Malloc(n_bytes);
        if (nodes == NULL) {
            pli_node_drop(&node);
            PyErr_NoMemory();
            return -1;
        }
        if (walk->nodes == walk->few_nodes)
            memcpy(nodes, walk->few_nodes, sizeof walk->few_nodes);
        walk->nodes = nodes;
        walk->n_nodes_allocated *= 2;
    }
    walk->nodes[walk->n_nodes++] = node;
    return 0;
}

static int record_way(pli_walk *walk, Py_ssize_t n_leaves)
{
    if (n_leaves == walk->n_ways_allocated) {
        char *ways = PyMem_Realloc(walk->ways, 2 * (size_t)walk->n_ways_allocated);
        if (ways == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        walk->ways = ways;
        walk->n_ways_allocated *= 2;
    }
    char way = PLI_SPLIT;
    if (walk->n_whole > 0)
        way = PLI_WHOLE;
    else if (walk->n_packs > 0)
        way = PLI_PACK_MORE;
    walk->ways[n_leaves] = way;
    return 0;
}

static int push_leaf(pli_walk *walk, PyObject *leaf, pli_kind kind)
{
    const Py_ssize_t n_leaves = PyList_GET_SIZE(walk->leaves);
    if (walk->ways != NULL && record_way(walk, n_leaves) != 0)
        return -1;
    if (PyList_Append(walk->leaves, leaf) != 0)
        return -1;
    return push_node(walk, (pli_node){.kind = kind});
}

static int walk_children(pli_walk *walk, PyObject *children)
{
    if (Py_EnterRecursiveCall(" while looking for tensors in nested containers"))
        return -1;
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyTuple_GET_SIZE(children); i++)
        status = pli_walk_value(walk, PyTuple_GET_ITEM(children, i));
    Py_LeaveRecursiveCall();
    return status;
}

/* A PackedSequence that is to be split, is split as one thing. */
static int walk_packed(pli_walk *walk, PyObject *value, PyObject *children)
{
    const Py_ssize_t first = PyList_GET_SIZE(walk->leaves);
    if (walk->packs == NULL && (walk->packs = PyList_New(0)) == NULL)
        return -1;
    if (PyList_Append(walk->packs, value) != 0)
        return -1;
    walk->n_packs++;
    const int status = walk_children(walk, children);
    walk->n_packs--;
    if (status == 0 && PyList_GET_SIZE(walk->leaves) > first)
        walk->ways[first] = PLI_PACK_FIRST;
    return status;
}

static int walk_marker(pli_walk *walk, PyObject *marker)
{
    PyObject *value = PyObject_GetAttr(marker, walk->state->name_value);
    if (value == NULL)
        return -1;
    int status = Py_EnterRecursiveCall(" while taking off markers of replicate()");
    if (status == 0) {
        walk->n_markers++;
        walk->n_whole++;
        status = pli_walk_value(walk, value);
        walk->n_whole--;
        Py_LeaveRecursiveCall();
    }
    Py_DECREF(value);
    return status;
}

int pli_walk_value(pli_walk *walk, PyObject *value) /* NOLINT(misc-no-recursion) */
{
    pli_node node;
    const int kind = pli_kind_of(walk->state, value);
    switch (kind) {
    case -1:
        return -1;
    case PLI_TENSOR:
    case PLI_ARRAY:
        return push_leaf(walk, value, (pli_kind)kind);
    case PLI_CONSTANT:
        node = (pli_node){.kind = PLI_CONSTANT, .extra = Py_NewRef(value)};
        return push_node(walk, node);
    case PLI_MARKER:
        return walk_marker(walk, value);
    default:
        break;
    }
    PyObject *children = pli_open(walk->state, value, (pli_kind)kind, &node);
    if (children == NULL)
        return -1;
    int status = push_node(walk, node);
    if (status == 0 && kind == PLI_PACKED && walk->ways != NULL && walk->n_whole == 0)
        status = walk_packed(walk, value, children);
    else if (status == 0)
        status = walk_children(walk, children);
    Py_DECREF(children);
    return status;
}

PyObject *pli_flatten(PyObject *module, PyObject *value)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    pli_walk walk;
    PyObject *result = NULL;
    pli_tree *tree = NULL;
    if (pli_needs_torch(state) != 0)
        return NULL;
    if (pli_walk_begin(&walk, state, 0) == 0 && pli_walk_value(&walk, value) == 0)
        tree = pli_tree_new(state, &walk);
    if (tree != NULL) {
        result = PyTuple_Pack(2, (PyObject *)tree, walk.leaves);
        Py_DECREF((PyObject *)tree);
    }
    pli_walk_drop(&walk);
    return result;
}
