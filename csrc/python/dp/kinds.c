/* kinds.c - the kinds of containers: how to read the children of each, and how to make
 * it again.
 *
 * The most frequent types are found by comparing pointers; all others cost a few looks
 * at the type.  Constructors of user classes do not run, except for tuples and for
 * types in torch's registry.  A dataclass's __init__ may need arguments that are not
 * fields.  Its __post_init__ ran on the whole, and must not run again on each chunk.
 */
#include "python/array.h"
#include "tree.h"

static int type_has(PyTypeObject *type, PyObject *name)
{
    return PyObject_HasAttr((PyObject *)type, name);
}

static int is_named(const module_state *state, PyTypeObject *type)
{
    return type_has(type, state->name__fields) && type_has(type, state->name__make);
}

static int kind_of_other(const module_state *state, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    if (PyType_IsSubtype(type, (PyTypeObject *)state->tensor_type))
        return PLI_TENSOR;
    const int is_array = pli_array_check(value);
    if (is_array != 0)
        return is_array < 0 ? -1 : PLI_ARRAY;
    if ((PyObject *)type == state->marker_type)
        return PLI_MARK;
    if ((PyObject *)type == state->packed_type)
        return PLI_PACKED;
    if ((PyObject *)type == state->size_type)
        return PLI_CONSTANT; /* a shape is not split */
    if (PyDict_GetItemWithError(state->registry, (PyObject *)type) != NULL)
        return PLI_REGISTERED;
    if (PyErr_Occurred())
        return -1;
    if (PyTuple_Check(value))
        return is_named(state, type) ? PLI_NAMED : PLI_TUPLE;
    if (PyList_Check(value))
        return PLI_LIST;
    if (PyDict_Check(value))
        return PLI_DICT;
    if (PyType_Check(value) || PyFunction_Check(value) || PyCFunction_Check(value))
        return PLI_CONSTANT;
    return type_has(type, state->name___dataclass_fields__) ? PLI_DATACLASS
                                                            : PLI_CONSTANT;
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

/* ---- opening: fills keys and children ------------------------------------------- */

static void open_tuple(const module_state *state, pli_container *self)
{
    (void)state;
    self->children = PyTuple_GetSlice(self->value, 0, PyTuple_GET_SIZE(self->value));
}

/* A class may make tuples whose length differs from its number of names. */
static void open_named(const module_state *state, pli_container *self)
{
    PyObject *names =
        PyObject_GetAttr((PyObject *)Py_TYPE(self->value), state->name__fields);
    if (names != NULL)
        open_tuple(state, self);
    if (names != NULL && PyTuple_Check(names) &&
        PyTuple_GET_SIZE(names) == PyTuple_GET_SIZE(self->value))
        self->keys = Py_NewRef(names);
    Py_XDECREF(names);
}

static void open_list(const module_state *state, pli_container *self)
{
    (void)state;
    self->children = PyList_AsTuple(self->value);
}

static void open_dict(const module_state *state, pli_container *self)
{
    (void)state;
    /* A subclass may have its own order. */
    self->keys = PySequence_Tuple(self->value);
    const Py_ssize_t n = self->keys != NULL ? PyTuple_GET_SIZE(self->keys) : 0;
    PyObject *children = self->keys != NULL ? PyTuple_New(n) : NULL;
    for (Py_ssize_t i = 0; children != NULL && i < n; i++) {
        PyObject *key = PyTuple_GET_ITEM(self->keys, i);
        PyObject *child = PyDict_GetItemWithError(self->value, key);
        if (child == NULL && !PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, key);
        pli_tuple_put(&children, i, Py_XNewRef(child));
    }
    self->children = children;
}

/* The fields that this instance has. */
static void open_dataclass(const module_state *state, pli_container *self)
{
    PyObject *fields = PyObject_CallOneArg(state->dataclass_fields, self->value);
    PyObject *names = PyList_New(0);
    PyObject *children = PyList_New(0);
    const Py_ssize_t n = fields != NULL ? PyTuple_GET_SIZE(fields) : -1;
    for (Py_ssize_t i = 0; i < n && names != NULL && children != NULL; i++) {
        PyObject *name =
            PyObject_GetAttr(PyTuple_GET_ITEM(fields, i), state->name_name);
        PyObject *child = name != NULL ? PyObject_GetAttr(self->value, name) : NULL;
        if (child != NULL &&
            (PyList_Append(names, name) != 0 || PyList_Append(children, child) != 0))
            Py_CLEAR(names);
        else if (child == NULL && PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Clear();
        else if (child == NULL)
            Py_CLEAR(names);
        Py_XDECREF(child);
        Py_XDECREF(name);
    }
    if (n >= 0 && names != NULL && children != NULL &&
        (self->keys = PyList_AsTuple(names)) != NULL)
        self->children = PyList_AsTuple(children);
    Py_XDECREF(fields);
    Py_XDECREF(names);
    Py_XDECREF(children);
}

/* If the children of a registered dict are its values, in order, sets their keys. */
static int find_keys(pli_container *self)
{
    PyObject *keys = PySequence_Tuple(self->value);
    const Py_ssize_t n = PyTuple_GET_SIZE(self->children);
    int are_same = keys != NULL && PyTuple_GET_SIZE(keys) == n;
    for (Py_ssize_t i = 0; are_same && i < n; i++)
        are_same = PyDict_GetItemWithError(self->value, PyTuple_GET_ITEM(keys, i)) ==
                   PyTuple_GET_ITEM(self->children, i);
    if (are_same)
        self->keys = Py_NewRef(keys);
    Py_XDECREF(keys);
    return PyErr_Occurred() ? -1 : 0;
}

/* Uses torch's registry: flatten(value) returns (children, context). */
static void open_registered(const module_state *state, pli_container *self)
{
    PyObject *parts = NULL;
    PyObject *definition =
        PyObject_GetItem(state->registry, (PyObject *)Py_TYPE(self->value));
    PyObject *flatten = definition != NULL
                            ? PyObject_GetAttr(definition, state->name_flatten_fn)
                            : NULL;
    if (flatten != NULL)
        self->maker = PyObject_GetAttr(definition, state->name_unflatten_fn);
    if (self->maker != NULL)
        parts = PyObject_CallOneArg(flatten, self->value);
    if (parts != NULL && (!PyTuple_Check(parts) || PyTuple_GET_SIZE(parts) != 2)) {
        PyErr_Format(PyExc_TypeError,
                     "the flatten function of %.200s in torch.utils._pytree returned "
                     "%R: it must return (children, context)",
                     Py_TYPE(self->value)->tp_name, parts);
    } else if (parts != NULL) {
        self->context = Py_NewRef(PyTuple_GET_ITEM(parts, 1));
        self->children = PySequence_Tuple(PyTuple_GET_ITEM(parts, 0));
        if (self->children != NULL && PyDict_Check(self->value) && find_keys(self) != 0)
            Py_CLEAR(self->children);
    }
    Py_XDECREF(parts);
    Py_XDECREF(flatten);
    Py_XDECREF(definition);
}

static void open_mark(const module_state *state, pli_container *self)
{
    PyObject *value = PyObject_GetAttr(self->value, state->name_value);
    self->children = value != NULL ? PyTuple_Pack(1, value) : NULL;
    Py_XDECREF(value);
}

/* ---- making again --------------------------------------------------------------- */

/* Copies the container's attributes to `made`, and returns it; NULL if it is NULL. */
static PyObject *with_attributes(const module_state *state, const pli_container *self,
                                 PyObject *made)
{
    PyObject *keys = self->kind == PLI_DATACLASS ? self->keys : Py_None;
    PyObject *args[] = {self->value, made, keys};
    PyObject *done = made != NULL
                         ? PyObject_Vectorcall(state->copy_attributes, args, 3, NULL)
                         : NULL;
    if (done == NULL)
        Py_CLEAR(made);
    Py_XDECREF(done);
    return made;
}

static PyObject *close_tuple(const module_state *state, const pli_container *self,
                             PyObject *items)
{
    PyObject *type = (PyObject *)Py_TYPE(self->value);
    if (type == (PyObject *)&PyTuple_Type)
        return Py_NewRef(items);
    PyObject *made = self->kind == PLI_TUPLE
                         ? PyObject_CallOneArg(type, items)
                         : PyObject_CallMethodOneArg(type, state->name__make, items);
    return with_attributes(state, self, made);
}

/* An instance made by type.__new__(type), without its __init__. */
static PyObject *blank(const module_state *state, const pli_container *self)
{
    PyTypeObject *type = Py_TYPE(self->value);
    if (type == &PyList_Type)
        return PyList_New(0);
    if (type == &PyDict_Type)
        return PyDict_New();
    PyObject *made = PyObject_CallMethodOneArg((PyObject *)type, state->name___new__,
                                               (PyObject *)type);
    if (made != NULL && !PyObject_TypeCheck(made, type)) {
        PyErr_Format(PyExc_TypeError, "%.200s.__new__ made a %.200s", type->tp_name,
                     Py_TYPE(made)->tp_name);
        Py_CLEAR(made);
    }
    return with_attributes(state, self, made);
}

static PyObject *close_object(const module_state *state, const pli_container *self,
                              PyObject *items)
{
    PyObject *made = self->made != NULL ? Py_NewRef(self->made) : blank(state, self);
    int status = made != NULL ? 0 : -1;
    if (status == 0 && self->kind == PLI_LIST)
        status = PyList_SetSlice(made, 0, PY_SSIZE_T_MAX, items);
    const int has_fields = status == 0 && self->kind != PLI_LIST &&
                           !PyDict_CheckExact(made) &&
                           type_has(Py_TYPE(made), state->name___dataclass_fields__);
    const Py_ssize_t n = self->keys != NULL ? PyTuple_GET_SIZE(items) : 0;
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        PyObject *key = PyTuple_GET_ITEM(self->keys, i);
        PyObject *item = PyTuple_GET_ITEM(items, i);
        if (has_fields)
            status = PyObject_GenericSetAttr(made, key, item);
        if (status == 0 && self->kind == PLI_DICT)
            status = PyObject_SetItem(made, key, item);
    }
    if (status != 0)
        Py_CLEAR(made);
    return made;
}

static PyObject *close_registered(const module_state *state, const pli_container *self,
                                  PyObject *items)
{
    (void)state;
    PyObject *list = PySequence_List(items);
    PyObject *args[] = {list, self->context};
    PyObject *made =
        list != NULL ? PyObject_Vectorcall(self->maker, args, 2, NULL) : NULL;
    Py_XDECREF(list);
    return made;
}

static PyObject *close_mark(const module_state *state, const pli_container *self,
                            PyObject *items)
{
    (void)self;
    return PyObject_Call(state->marker_type, items, NULL);
}

/* ---- the table ------------------------------------------------------------------ */

static const struct {
    void (*open)(const module_state *, pli_container *);
    PyObject *(*close)(const module_state *, const pli_container *, PyObject *);
} kinds[PLI_N_KINDS] = {
    [PLI_TUPLE] = {open_tuple, close_tuple},
    [PLI_LIST] = {open_list, close_object},
    [PLI_DICT] = {open_dict, close_object},
    [PLI_NAMED] = {open_named, close_tuple},
    [PLI_PACKED] = {open_named, close_tuple},
    [PLI_DATACLASS] = {open_dataclass, close_object},
    [PLI_REGISTERED] = {open_registered, close_registered},
    [PLI_MARK] = {open_mark, close_mark},
};

int pli_open(const module_state *state, PyObject *value, pli_kind kind,
             pli_container *out)
{
    *out = (pli_container){.kind = kind, .value = value};
    kinds[kind].open(state, out);
    return out->children != NULL ? 0 : -1;
}

int pli_begin(const module_state *state, pli_container *self)
{
    if (kinds[self->kind].close != close_object)
        return 0;
    self->made = blank(state, self);
    return self->made != NULL ? 0 : -1;
}

PyObject *pli_close(const module_state *state, const pli_container *self,
                    PyObject *items)
{
    return kinds[self->kind].close(state, self, items);
}

void pli_container_drop(pli_container *self)
{
    Py_CLEAR(self->children);
    Py_CLEAR(self->keys);
    Py_CLEAR(self->maker);
    Py_CLEAR(self->context);
    Py_CLEAR(self->made);
}
