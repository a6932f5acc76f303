/* tree_open.c - which containers there are, and what each has inside.
 *
 * What is met most is told by a comparison of pointers; everything else pays for a few
 * looks at its type.
 */
#include "tree.h"

#include "python/array.h"

/* ---- kinds ---------------------------------------------------------------------- */

static int is_subtype(PyTypeObject *type, PyObject *base)
{
    return PyType_IsSubtype(type, (PyTypeObject *)base);
}

static int type_has(PyTypeObject *type, PyObject *name)
{
    return PyObject_HasAttr((PyObject *)type, name);
}

static pli_kind kind_of_tuple(const module_state *state, PyTypeObject *type)
{
    if ((PyObject *)type == state->packed_type)
        return PLI_PACKED;
    return type_has(type, state->name__fields) && type_has(type, state->name__make)
               ? PLI_NAMED
               : PLI_TUPLE_LIKE;
}

static int kind_of_object(const module_state *state, PyTypeObject *type)
{
    if (type_has(type, state->name___dataclass_fields__))
        return PLI_ATTRIBUTES;
    if (PyDict_GetItemWithError(state->registry, (PyObject *)type) != NULL)
        return PLI_REGISTERED;
    if (PyErr_Occurred())
        return -1;
    return is_subtype(type, state->user_dict_type) ? PLI_ATTRIBUTES : PLI_CONSTANT;
}

static int kind_of_other(const module_state *state, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    if (is_subtype(type, state->tensor_type))
        return PLI_TENSOR;
    const int is_array = pli_array_check(value);
    if (is_array != 0)
        return is_array < 0 ? -1 : PLI_ARRAY;
    if ((PyObject *)type == state->marker_type)
        return PLI_MARKER;
    if (PyTuple_Check(value))
        return (int)kind_of_tuple(state, type);
    if (PyList_Check(value))
        return PLI_LIST_LIKE;
    if (PyDict_Check(value))
        return type_has(type, state->name___dataclass_fields__) ? PLI_OUTPUT
                                                                : PLI_DICT_LIKE;
    if (PyType_Check(value) || PyFunction_Check(value) || PyCFunction_Check(value))
        return PLI_CONSTANT;
    return kind_of_object(state, type);
}

int pli_kind_of(const module_state *state, PyObject *value)
{
    const PyTypeObject *type = Py_TYPE(value);
    if ((const PyObject *)type == state->tensor_type)
        return PLI_TENSOR;
    if (type == &PyTuple_Type)
        return PLI_TUPLE;
    if (type == &PyDict_Type)
        return PLI_DICT;
    if (type == &PyList_Type)
        return PLI_LIST;
    if (value == Py_None || type == &PyBool_Type || type == &PyLong_Type ||
        type == &PyFloat_Type || type == &PyUnicode_Type || type == &PyBytes_Type)
        return PLI_CONSTANT;
    return kind_of_other(state, value);
}

/* ---- what is inside ------------------------------------------------------------- */

void pli_node_drop(pli_node *node)
{
    Py_CLEAR(node->type);
    Py_CLEAR(node->keys);
    Py_CLEAR(node->extra);
    Py_CLEAR(node->attributes);
    node->n_children = 0;
}

/* Copies into `kept` what `all` has beside the children, but for what a
 * cached_property keeps there: it was computed from the children. */
static int keep_others(const module_state *state, PyObject *value, PyObject *all,
                       PyObject *keys, PyObject *kept)
{
    PyObject *name, *attribute;
    Py_ssize_t at = 0;
    while (PyDict_Next(all, &at, &name, &attribute)) {
        const int is_child = keys != NULL ? PySequence_Contains(keys, name) : 0;
        if (is_child < 0)
            return -1;
        if (is_child)
            continue;
        PyObject *owner = PyObject_GetAttr((PyObject *)Py_TYPE(value), name);
        if (owner == NULL)
            PyErr_Clear();
        const int is_cache =
            owner != NULL && is_subtype(Py_TYPE(owner), state->cached_type);
        Py_XDECREF(owner);
        if (!is_cache && PyDict_SetItem(kept, name, attribute) != 0)
            return -1;
    }
    return 0;
}

static int read_attributes(const module_state *state, PyObject *value, PyObject *names,
                           pli_node *out)
{
    int result = -1;
    PyObject *kept = NULL;
    PyObject *all = PyObject_GetAttr(value, state->name___dict__);
    if (all == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear(); /* slots alone */
        return 0;
    }
    if (all == value) {
        out->attributes = Py_NewRef(Py_Ellipsis);
        result = 0;
    } else if (!PyDict_Check(all) || PyDict_GET_SIZE(all) == 0) {
        result = 0;
    } else if ((kept = PyDict_New()) != NULL &&
               keep_others(state, value, all, names, kept) == 0) {
        if (PyDict_GET_SIZE(kept) > 0)
            out->attributes = Py_NewRef(kept);
        result = 0;
    }
    Py_XDECREF(kept);
    Py_DECREF(all);
    return result;
}

static PyObject *open_dict(PyObject *value, pli_node *out)
{
    /* An OrderedDict has an order of its own, which its iterator knows. */
    PyObject *keys = PyODict_Check(value) && !PyODict_CheckExact(value)
                         ? PySequence_List(value)
                         : NULL;
    if (keys == NULL && !PyErr_Occurred())
        keys = PyODict_CheckExact(value) ? PySequence_List(value) : PyDict_Keys(value);
    if (keys == NULL)
        return NULL;
    out->keys = PyList_AsTuple(keys);
    Py_DECREF(keys);
    const Py_ssize_t n = out->keys != NULL ? PyTuple_GET_SIZE(out->keys) : 0;
    PyObject *children = out->keys != NULL ? PyTuple_New(n) : NULL;
    for (Py_ssize_t i = 0; children != NULL && i < n; i++) {
        PyObject *key = PyTuple_GET_ITEM(out->keys, i);
        PyObject *child = PyDict_GetItemWithError(value, key);
        if (child == NULL && !PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, key);
        pli_tuple_put(&children, i, Py_XNewRef(child));
    }
    return children;
}

/* The names of a dataclass's fields that this instance has. */
static PyObject *names_of_fields(const module_state *state, PyObject *value)
{
    PyObject *fields = PyObject_CallOneArg(state->dataclass_fields, value);
    if (fields != NULL && !PyTuple_Check(fields)) {
        PyErr_SetString(PyExc_TypeError, "dataclasses.fields returned no tuple");
        Py_CLEAR(fields);
    }
    PyObject *names = fields != NULL ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(fields); i++) {
        PyObject *name =
            PyObject_GetAttr(PyTuple_GET_ITEM(fields, i), state->name_name);
        if (name == NULL ||
            (PyObject_HasAttr(value, name) && PyList_Append(names, name) != 0))
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    PyObject *result = names != NULL ? PyList_AsTuple(names) : NULL;
    Py_XDECREF(names);
    Py_XDECREF(fields);
    return result;
}

static PyObject *open_attributes(const module_state *state, PyObject *value,
                                 pli_node *out)
{
    out->keys = type_has(Py_TYPE(value), state->name___dataclass_fields__)
                    ? names_of_fields(state, value)
                    : PyTuple_Pack(1, state->name_data);
    const Py_ssize_t n = out->keys != NULL ? PyTuple_GET_SIZE(out->keys) : 0;
    PyObject *children = out->keys != NULL ? PyTuple_New(n) : NULL;
    for (Py_ssize_t i = 0; children != NULL && i < n; i++)
        pli_tuple_put(&children, i,
                      PyObject_GetAttr(value, PyTuple_GET_ITEM(out->keys, i)));
    return children;
}

/* Asks torch's registry: flatten(value) gives (children, context). */
static PyObject *open_registered(const module_state *state, PyObject *value,
                                 pli_node *out)
{
    PyObject *children = NULL;
    PyObject *parts = NULL;
    PyObject *definition =
        PyDict_GetItemWithError(state->registry, (PyObject *)Py_TYPE(value));
    if (definition == NULL)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_KeyError, "registry");
    Py_INCREF(definition);
    PyObject *flatten = PyObject_GetAttr(definition, state->name_flatten_fn);
    out->keys = PyObject_GetAttr(definition, state->name_unflatten_fn);
    if (flatten != NULL && out->keys != NULL)
        parts = PyObject_CallOneArg(flatten, value);
    if (parts != NULL && (!PyTuple_Check(parts) || PyTuple_GET_SIZE(parts) != 2)) {
        PyErr_Format(PyExc_TypeError,
                     "the function that torch.utils._pytree has for flattening %.200s "
                     "returned %R: it must return (children, context)",
                     Py_TYPE(value)->tp_name, parts);
    } else if (parts != NULL) {
        children = PySequence_Tuple(PyTuple_GET_ITEM(parts, 0));
        out->extra = Py_NewRef(PyTuple_GET_ITEM(parts, 1));
    }
    Py_XDECREF(parts);
    Py_XDECREF(flatten);
    Py_DECREF(definition);
    return children;
}

static PyObject *open_tuple(PyObject *value)
{
    return PyTuple_CheckExact(value)
               ? Py_NewRef(value)
               : PyTuple_GetSlice(value, 0, PyTuple_GET_SIZE(value));
}

static PyObject *open_kind(const module_state *state, PyObject *value, pli_node *out)
{
    switch (out->kind) {
    case PLI_NAMED:
    case PLI_PACKED:
        out->keys = PyObject_GetAttr((PyObject *)out->type, state->name__fields);
        return out->keys != NULL ? open_tuple(value) : NULL;
    case PLI_LIST:
    case PLI_LIST_LIKE:
        return PyList_AsTuple(value);
    case PLI_DICT_LIKE:
        if (is_subtype(out->type, state->default_dict_type)) {
            out->extra = PyObject_GetAttr(value, state->name_default_factory);
            if (out->extra == NULL)
                return NULL;
        }
        return open_dict(value, out);
    case PLI_DICT:
    case PLI_OUTPUT:
        return open_dict(value, out);
    case PLI_ATTRIBUTES:
        return open_attributes(state, value, out);
    case PLI_REGISTERED:
        return open_registered(state, value, out);
    default:
        return open_tuple(value);
    }
}

PyObject *pli_open(const module_state *state, PyObject *value, pli_kind kind,
                   pli_node *out)
{
    *out = (pli_node){.kind = kind};
    out->type = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(value));
    PyObject *children = open_kind(state, value, out);
    const int has_attributes =
        kind >= PLI_TUPLE_LIKE && kind != PLI_REGISTERED && kind != PLI_PACKED;
    PyObject *names = kind == PLI_OUTPUT || kind == PLI_ATTRIBUTES ? out->keys : NULL;
    if (children != NULL && has_attributes &&
        read_attributes(state, value, names, out) != 0)
        Py_CLEAR(children);
    if (children == NULL)
        pli_node_drop(out);
    else
        out->n_children = PyTuple_GET_SIZE(children);
    return children;
}
