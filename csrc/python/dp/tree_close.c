/* tree_close.c - containers made again, with other children.
 *
 * No constructor of a user's class runs, but for tuples that know no other way and for
 * what torch's registry has: a dataclass's __init__ may want arguments that are no
 * fields, and its __post_init__ would work on chunks what it worked on the whole.
 */
#include "tree.h"

/* ---- one container -------------------------------------------------------------- */

/* What type.__new__(type) makes: an instance before its __init__. */
static PyObject *blank(const module_state *state, const pli_node *node)
{
    PyObject *type = (PyObject *)node->type;
    PyObject *args[] = {type, type};
    PyObject *create = PyObject_GetAttr(type, state->name___new__);
    if (create == NULL)
        return NULL;
    PyObject *made = PyObject_Vectorcall(create, args + 1, 1, NULL);
    Py_DECREF(create);
    return made;
}

static int give_attributes(const module_state *state, const pli_node *node,
                           PyObject *made)
{
    if (node->attributes == NULL)
        return 0;
    if (node->attributes == Py_Ellipsis)
        return PyObject_GenericSetAttr(made, state->name___dict__, made);
    PyObject *all = PyObject_GetAttr(made, state->name___dict__);
    if (all == NULL)
        return -1;
    const int status = PyDict_Update(all, node->attributes);
    Py_DECREF(all);
    return status;
}

static int give_children(const pli_node *node, PyObject *made, PyObject *items)
{
    if (node->kind == PLI_LIST_LIKE)
        return PyList_SetSlice(made, 0, PY_SSIZE_T_MAX, items);
    for (Py_ssize_t i = 0; i < node->n_children; i++) {
        PyObject *key = PyTuple_GET_ITEM(node->keys, i);
        PyObject *item = PyTuple_GET_ITEM(items, i);
        int status = 0;
        if (node->kind == PLI_DICT_LIKE)
            status = PyObject_SetItem(made, key, item);
        else
            status = PyObject_GenericSetAttr(made, key, item);
        if (status == 0 && node->kind == PLI_OUTPUT)
            status = PyODict_Check(made) ? PyODict_SetItem(made, key, item)
                                         : PyDict_SetItem(made, key, item);
        if (status != 0)
            return -1;
    }
    return 0;
}

static PyObject *close_object(const module_state *state, const pli_node *node,
                              PyObject *items)
{
    PyObject *made = blank(state, node);
    if (made == NULL)
        return NULL;
    if (!PyObject_TypeCheck(made, node->type)) {
        PyErr_Format(PyExc_TypeError, "%.200s.__new__ made a %.200s",
                     node->type->tp_name, Py_TYPE(made)->tp_name);
        Py_CLEAR(made);
    } else if ((node->kind == PLI_DICT_LIKE && node->extra != NULL &&
                PyObject_SetAttr(made, state->name_default_factory, node->extra) !=
                    0) ||
               give_attributes(state, node, made) != 0 ||
               give_children(node, made, items) != 0) {
        Py_CLEAR(made);
    }
    return made;
}

static PyObject *close_dict(const pli_node *node, PyObject *items)
{
    PyObject *made = PyDict_New();
    for (Py_ssize_t i = 0; made != NULL && i < node->n_children; i++)
        if (PyDict_SetItem(made, PyTuple_GET_ITEM(node->keys, i),
                           PyTuple_GET_ITEM(items, i)) != 0)
            Py_CLEAR(made);
    return made;
}

static PyObject *close_tuple(const module_state *state, const pli_node *node,
                             PyObject *items)
{
    PyObject *type = (PyObject *)node->type;
    PyObject *made = node->kind == PLI_TUPLE_LIKE
                         ? PyObject_CallOneArg(type, items)
                         : PyObject_CallMethodOneArg(type, state->name__make, items);
    if (made != NULL && give_attributes(state, node, made) != 0)
        Py_CLEAR(made);
    return made;
}

static PyObject *close_registered(const pli_node *node, PyObject *items)
{
    PyObject *list = PySequence_List(items);
    if (list == NULL)
        return NULL;
    PyObject *args[] = {list, node->extra};
    PyObject *made = PyObject_Vectorcall(node->keys, args, 2, NULL);
    Py_DECREF(list);
    return made;
}

PyObject *pli_close(const module_state *state, const pli_node *node, PyObject *items)
{
    PyObject *made = NULL;
    switch (node->kind) {
    case PLI_TUPLE:
        return items;
    case PLI_LIST:
        made = PySequence_List(items);
        break;
    case PLI_DICT:
        made = close_dict(node, items);
        break;
    case PLI_TUPLE_LIKE:
    case PLI_NAMED:
    case PLI_PACKED:
        made = close_tuple(state, node, items);
        break;
    case PLI_REGISTERED:
        made = close_registered(node, items);
        break;
    default:
        made = close_object(state, node, items);
    }
    Py_DECREF(items);
    return made;
}

/* ---- a tree --------------------------------------------------------------------- */

typedef struct cursor {
    const module_state *state;
    const pli_node *node;
    PyObject **leaf; /* borrowed */
} cursor;

static PyObject *build(cursor *at) /* NOLINT(misc-no-recursion) */
{
    const pli_node *node = at->node++;
    if (node->kind == PLI_CONSTANT)
        return Py_NewRef(node->extra);
    if (node->kind < PLI_CONSTANT)
        return Py_NewRef(*at->leaf++);
    if (Py_EnterRecursiveCall(" while nested containers are built"))
        return NULL;
    PyObject *items = PyTuple_New(node->n_children);
    for (Py_ssize_t i = 0; items != NULL && i < node->n_children; i++)
        pli_tuple_put(&items, i, build(at));
    Py_LeaveRecursiveCall();
    return items != NULL ? pli_close(at->state, node, items) : NULL;
}

PyObject *pli_tree_unflatten(const module_state *state, const pli_tree *tree,
                             PyObject *leaves)
{
    cursor at = {
        .state = state, .node = tree->nodes, .leaf = PySequence_Fast_ITEMS(leaves)};
    return build(&at);
}
