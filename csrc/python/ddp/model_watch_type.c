/* model_watch_type.c - paceline._native.Watch: has a model changed since it was
 * wrapped?
 *
 * Each forward calls it, so it makes only cheap checks, of about 60 ns per parameter.
 * Each dictionary of a module must have as many entries, and each watched entry must be
 * the same object.  Each parameter must have the same dtype and __dict__ (torch moves a
 * __dict__ and hooks when it swaps the contents of two tensors).  No frozen parameter
 * may require a gradient now.
 */
#include "python/state.h"

#include "core/alloc.h"

/* dict[key] was `value`; the last three are for a parameter. */
typedef struct watched_item {
    PyObject *dict;
    PyObject *key;
    PyObject *value;
    PyObject *dtype;      /* NULL if not a parameter */
    PyObject *attributes; /* the parameter's __dict__ */
    PyObject *requires_grad;
} watched_item;

typedef struct watched_dict {
    PyObject *dict;
    Py_ssize_t n_entries;
} watched_dict;

typedef struct watch_object {
    PyObject_HEAD
    watched_dict *dicts;
    Py_ssize_t n_dicts;
    watched_item *items;
    Py_ssize_t n_items;
} watch_object;

/* ---- construction --------------------------------------------------------------- */

static int read_dict(PyObject *object, watched_dict *out)
{
    if (!PyDict_Check(object))
        return pli_error(PyExc_TypeError, "dicts has %R: give dictionaries", object);
    *out = (watched_dict){.dict = Py_NewRef(object), .n_entries = PyDict_Size(object)};
    return 0;
}

static int read_item(const module_state *state, PyObject *pair, int is_parameter,
                     watched_item *out)
{
    PyObject *dict, *key;
    if (!PyTuple_Check(pair) ||
        !PyArg_ParseTuple(pair, "O!U", &PyDict_Type, &dict, &key))
        return pli_error(PyExc_TypeError, "%R: give pairs of (dict, key)", pair);
    PyObject *value = PyDict_GetItemWithError(dict, key);
    if (value == NULL) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_KeyError, "'%U' is not in its dict", key);
        return -1;
    }
    *out = (watched_item){
        .dict = Py_NewRef(dict), .key = Py_NewRef(key), .value = Py_NewRef(value)};
    if (!is_parameter)
        return 0;
    out->attributes = PyObject_GenericGetDict(value, NULL);
    if (out->attributes == NULL)
        PyErr_Clear(); /* its type has none */
    out->dtype = PyObject_GetAttr(value, state->name_dtype);
    out->requires_grad = PyObject_GetAttr(value, state->name_requires_grad);
    return out->dtype != NULL && out->requires_grad != NULL ? 0 : -1;
}

static int read_dicts(const module_state *state, watch_object *self, PyObject *dicts)
{
    const Py_ssize_t n = PyList_GET_SIZE(dicts);
    if (pli_check(state, pli_calloc((size_t)n, sizeof *self->dicts, "a model's watch",
                                    &self->dicts)) != 0)
        return -1;
    for (; self->n_dicts < n; self->n_dicts++)
        if (read_dict(PyList_GET_ITEM(dicts, self->n_dicts),
                      &self->dicts[self->n_dicts]) != 0)
            return -1;
    return 0;
}

static int read_items(const module_state *state, watch_object *self, PyObject *items,
                      PyObject *parameters)
{
    const Py_ssize_t n_plain = PyList_GET_SIZE(items);
    const Py_ssize_t n = n_plain + PyList_GET_SIZE(parameters);
    if (pli_check(state, pli_calloc((size_t)n, sizeof *self->items, "a model's watch",
                                    &self->items)) != 0)
        return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        const int is_parameter = i >= n_plain;
        PyObject *pair = is_parameter ? PyList_GET_ITEM(parameters, i - n_plain)
                                      : PyList_GET_ITEM(items, i);
        self->n_items = i + 1; /* so that clear drops a half-read one too */
        if (read_item(state, pair, is_parameter, &self->items[i]) != 0)
            return -1;
    }
    return 0;
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"dicts", "items", "parameters", NULL};
    const module_state *state = state_of_type(type);
    PyObject *dicts, *items, *parameters;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!:Watch", names, &PyList_Type,
                                     &dicts, &PyList_Type, &items, &PyList_Type,
                                     &parameters))
        return NULL;
    watch_object *self = (watch_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (read_dicts(state, self, dicts) != 0 ||
        read_items(state, self, items, parameters) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* ---- the check ------------------------------------------------------------------- */

/* Returns 1 if object.name is no longer `was`, 0, or -1. */
static int has_changed(PyObject *object, PyObject *name, PyObject *was)
{
    PyObject *now = PyObject_GetAttr(object, name);
    Py_XDECREF(now); /* dtypes and booleans stay alive */
    return now == NULL ? -1 : now != was;
}

static int was_swapped(PyObject *object, const PyObject *attributes)
{
    if (attributes == NULL)
        return 0;
    PyObject *now = PyObject_GenericGetDict(object, NULL);
    Py_XDECREF(now); /* compared, never read */
    PyErr_Clear();
    return now != attributes;
}

static int item_has_changed(const module_state *state, const watched_item *item)
{
    PyObject *value = PyDict_GetItemWithError(item->dict, item->key);
    if (value != item->value)
        return PyErr_Occurred() != NULL ? -1 : 1;
    if (item->dtype == NULL)
        return 0;
    if (was_swapped(value, item->attributes))
        return 1;
    const int dtype = has_changed(value, state->name_dtype, item->dtype);
    if (dtype != 0)
        return dtype;
    /* A trained parameter that was frozen gets no gradients: it needs no new wrapping,
     * and is often unfrozen soon (adversarial training). */
    if (item->requires_grad == Py_True)
        return 0;
    return has_changed(value, state->name_requires_grad, item->requires_grad);
}

static PyObject *watch_changed(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const watch_object *self = (watch_object *)object;
    const module_state *state = state_of(object);
    (void)ignored;
    for (Py_ssize_t d = 0; d < self->n_dicts; d++)
        if (PyDict_Size(self->dicts[d].dict) != self->dicts[d].n_entries)
            Py_RETURN_TRUE;
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        const int changed = item_has_changed(state, &self->items[i]);
        if (changed < 0)
            return NULL;
        if (changed)
            Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

/* ---- life ----------------------------------------------------------------------- */

static int watch_traverse(PyObject *object, visitproc visit, void *arg)
{
    const watch_object *self = (watch_object *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t d = 0; d < self->n_dicts; d++)
        Py_VISIT(self->dicts[d].dict);
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        Py_VISIT(self->items[i].dict);
        Py_VISIT(self->items[i].value);
        Py_VISIT(self->items[i].attributes);
    }
    return 0;
}

static int watch_clear(PyObject *object)
{
    watch_object *self = (watch_object *)object;
    const Py_ssize_t n_dicts = self->n_dicts;
    const Py_ssize_t n_items = self->n_items;
    self->n_dicts = self->n_items = 0;
    for (Py_ssize_t d = 0; d < n_dicts; d++)
        Py_CLEAR(self->dicts[d].dict);
    for (Py_ssize_t i = 0; i < n_items; i++) {
        Py_CLEAR(self->items[i].dict);
        Py_CLEAR(self->items[i].key);
        Py_CLEAR(self->items[i].value);
        Py_CLEAR(self->items[i].attributes);
        Py_CLEAR(self->items[i].dtype);
        Py_CLEAR(self->items[i].requires_grad);
    }
    return 0;
}

static void watch_dealloc(PyObject *object)
{
    watch_object *self = (watch_object *)object;
    PyObject_GC_UnTrack(object);
    (void)watch_clear(object);
    pli_free(self->dicts);
    pli_free(self->items);
    pli_object_free(object);
}

static PyMethodDef watch_methods[] = {
    {"changed", watch_changed, METH_NOARGS,
     "changed($self, /)\n--\n\nTell whether anything differs from construction."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_new, watch_new},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_traverse, watch_traverse},
    {Py_tp_clear, watch_clear},
    {Py_tp_methods, watch_methods},
    {Py_tp_doc, "Watch(dicts, items, parameters)\n--\n\n"
                "A model's structure: dictionaries by size, (dict, key) by identity."},
    {0, NULL},
};

PLI_TYPE(watch, Watch, Py_TPFLAGS_HAVE_GC);
