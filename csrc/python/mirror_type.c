/* mirror_type.c - paceline._native.Mirror: which dictionaries have changed since last?
 *
 * A module is its dictionaries: attributes, parameters, children, hooks.  A mirror
 * keeps a copy of each and compares the entries by identity, pair by pair in their
 * order: about 4 ns an entry, so that every forward can ask.  What a difference means
 * is for its caller to say, who looks at the live dictionary and at the copy.
 */
#include "state.h"

#include "../core/alloc.h"

/* What a dictionary held: values are compared by position, keys by a sum over their
 * addresses and positions, so that a check touches little memory. */
typedef struct mirrored {
    PyObject *live;
    PyObject **values; /* owned references; then as many keys */
    Py_ssize_t n_seen;
    uintptr_t keys_sum;
} mirrored;

typedef struct mirror_object {
    PyObject_HEAD
    mirrored *items;
    Py_ssize_t n_items;
} mirror_object;

/* ---- taking and comparing ---------------------------------------------------------
 */

static void drop(mirrored *item)
{
    PyObject **values = item->values;
    const Py_ssize_t n = item->n_seen;
    item->values = NULL;
    item->n_seen = 0;
    for (Py_ssize_t i = 0; values != NULL && i < 2 * n; i++)
        Py_DECREF(values[i]);
    PyMem_Free(values);
}

static uintptr_t weigh(PyObject *key, Py_ssize_t position)
{
    return (uintptr_t)key * (uintptr_t)(2 * position + 1);
}

static int take(mirrored *item)
{
    const Py_ssize_t n = PyDict_Size(item->live);
    PyObject **values = PyMem_Calloc((size_t)(2 * n + 1), sizeof(PyObject *));
    mirrored fresh = {.live = item->live, .values = values};
    PyObject *key, *value;
    Py_ssize_t at = 0;
    if (values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    while (fresh.n_seen < n && PyDict_Next(item->live, &at, &key, &value)) {
        fresh.keys_sum += weigh(key, fresh.n_seen);
        values[fresh.n_seen] = Py_NewRef(value);
        values[n + fresh.n_seen++] = Py_NewRef(key);
    }
    mirrored before = *item;
    *item = fresh;
    drop(&before); /* may run code of the values' own */
    return 0;
}

static int is_same(const mirrored *item)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    Py_ssize_t n = 0;
    uintptr_t keys_sum = 0;
    if (PyDict_Size(item->live) != item->n_seen)
        return 0;
    if (item->n_seen == 0)
        return 1;
    for (; PyDict_Next(item->live, &at, &key, &value); n++) {
        if (value != item->values[n])
            return 0;
        keys_sum += weigh(key, n);
    }
    return keys_sum == item->keys_sum;
}

static PyObject *mirror_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"dicts", NULL};
    const module_state *state = state_of_type(type);
    PyObject *dicts;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Mirror", names, &PyList_Type,
                                     &dicts))
        return NULL;
    mirror_object *self = (mirror_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    const Py_ssize_t n = PyList_GET_SIZE(dicts);
    if (pli_check(state, pli_calloc((size_t)n + 1, sizeof *self->items,
                                    "a mirror of dictionaries", &self->items)) != 0)
        goto fail;
    for (; self->n_items < n; self->n_items++) {
        PyObject *dict = PyList_GET_ITEM(dicts, self->n_items);
        if (!PyDict_Check(dict)) {
            PyErr_Format(PyExc_TypeError, "dicts[%zd] is %R: give dictionaries",
                         self->n_items, dict);
            goto fail;
        }
        self->items[self->n_items].live = Py_NewRef(dict);
        if (take(&self->items[self->n_items]) != 0) {
            self->n_items++; /* the half-taken one is dropped too */
            goto fail;
        }
    }
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

/* Calls nothing of Python's, so no dictionary changes under the loop. */
static PyObject *mirror_differing(PyObject *object, PyObject *ignored)
{
    const mirror_object *self = (mirror_object *)object;
    PyObject *found = NULL;
    (void)ignored;
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        if (is_same(&self->items[i]))
            continue;
        if (found == NULL && (found = PyList_New(0)) == NULL)
            return NULL;
        PyObject *index = PyLong_FromSsize_t(i);
        const int status = index != NULL ? PyList_Append(found, index) : -1;
        Py_XDECREF(index);
        if (status != 0) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found != NULL ? found : PyTuple_New(0);
}

static PyObject *mirror_pair(PyObject *object, PyObject *arg)
{
    const mirror_object *self = (mirror_object *)object;
    const Py_ssize_t i = PyLong_AsSsize_t(arg);
    if (i == -1 && PyErr_Occurred())
        return NULL;
    if (i < 0 || i >= self->n_items) {
        PyErr_Format(PyExc_IndexError, "index is %zd: this mirror has %zd dictionaries",
                     i, self->n_items);
        return NULL;
    }
    const mirrored *item = &self->items[i];
    PyObject *seen = PyDict_New();
    for (Py_ssize_t n = 0; seen != NULL && n < item->n_seen; n++)
        if (PyDict_SetItem(seen, item->values[item->n_seen + n], item->values[n]) != 0)
            Py_CLEAR(seen);
    PyObject *pair = seen != NULL ? PyTuple_Pack(2, item->live, seen) : NULL;
    Py_XDECREF(seen);
    return pair;
}

static PyObject *mirror_accept(PyObject *object, PyObject *ignored)
{
    const mirror_object *self = (mirror_object *)object;
    (void)ignored;
    for (Py_ssize_t i = 0; i < self->n_items; i++)
        if (!is_same(&self->items[i]) && take(&self->items[i]) != 0)
            return NULL;
    Py_RETURN_NONE;
}

/* ---- life ----------------------------------------------------------------------- */

static int mirror_traverse(PyObject *object, visitproc visit, void *arg)
{
    const mirror_object *self = (mirror_object *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        const mirrored *item = &self->items[i];
        Py_VISIT(item->live);
        for (Py_ssize_t n = 0; n < 2 * item->n_seen; n++)
            Py_VISIT(item->values[n]);
    }
    return 0;
}

static int mirror_clear(PyObject *object)
{
    mirror_object *self = (mirror_object *)object;
    const Py_ssize_t n = self->n_items;
    self->n_items = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        drop(&self->items[i]);
        Py_CLEAR(self->items[i].live);
    }
    return 0;
}

static void mirror_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)mirror_clear(object);
    pli_free(((mirror_object *)object)->items);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef mirror_methods[] = {
    {"differing", mirror_differing, METH_NOARGS,
     "differing($self, /)\n--\n\nReturn the indices of the dictionaries that differ "
     "from what was last accepted."},
    {"pair", mirror_pair, METH_O,
     "pair($self, index, /)\n--\n\nReturn a dictionary and the copy of it as it was."},
    {"accept", mirror_accept, METH_NOARGS,
     "accept($self, /)\n--\n\nTake every dictionary as it is now."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot mirror_slots[] = {
    {Py_tp_new, mirror_new},
    {Py_tp_dealloc, mirror_dealloc},
    {Py_tp_traverse, mirror_traverse},
    {Py_tp_clear, mirror_clear},
    {Py_tp_methods, mirror_methods},
    {Py_tp_doc, "Mirror(dicts)\n--\n\nDictionaries, compared by the identity of their "
                "entries."},
    {0, NULL},
};

PyType_Spec pli_mirror_spec = {
    .name = "paceline._native.Mirror",
    .basicsize = sizeof(mirror_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = mirror_slots,
};
