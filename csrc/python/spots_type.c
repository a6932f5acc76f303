/* spots_type.c - paceline._native.Spots: places where code may change, watched.
 *
 * What a forward computes depends on more than its module: on the globals that its
 * functions read, on cells, on code that somebody replaces (importlib.reload, a cell of
 * a notebook that is run again), on the methods of classes.  Each is a spot that holds
 * one thing, and is compared by identity, about 10 ns each, so that every forward can
 * ask.  A class is compared by Python's own version of it, which changes with any of
 * its attributes or its bases'; it changes at other times too, so that a difference
 * means: look.
 */
#include "state.h"

#include "../core/alloc.h"

typedef struct spot {
    PyObject *holder; /* a dict, a cell, a function, a type or a list */
    PyObject *name;   /* of the entry, where it is a dict */
    PyObject *seen;   /* owned; NULL: there was nothing */
    PyObject *extra;  /* a function's defaults */
    unsigned version; /* of a type */
} spot;

typedef struct spots_object {
    PyObject_HEAD
    spot *items;
    Py_ssize_t n_items;
} spots_object;

/* ---- taking and comparing ---------------------------------------------------------
 */

/* What the spot holds now: borrowed, NULL for nothing; lists are looked into. */
static PyObject *held_by(const spot *item)
{
    if (item->name != NULL) {
        PyObject *value = PyDict_GetItemWithError(item->holder, item->name);
        if (value == NULL)
            PyErr_Clear(); /* keys are strings: no comparison fails */
        return value;
    }
    if (PyCell_Check(item->holder))
        return PyCell_GET(item->holder);
    if (PyFunction_Check(item->holder))
        return PyFunction_GET_CODE(item->holder);
    return NULL;
}

static PyObject *extra_of(const spot *item)
{
    const int is_function = PyFunction_Check(item->holder);
    return is_function ? PyFunction_GET_DEFAULTS(item->holder) : NULL;
}

static unsigned version_of(const spot *item)
{
    const PyTypeObject *type = (PyTypeObject *)item->holder;
    if (!PyType_Check(item->holder))
        return 0;
    return (type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG) != 0 ? type->tp_version_tag
                                                                : 0;
}

static int is_same_list(const spot *item)
{
    const Py_ssize_t n = PyList_GET_SIZE(item->holder);
    if (n != PyTuple_GET_SIZE(item->seen))
        return 0;
    for (Py_ssize_t i = 0; i < n; i++)
        if (PyList_GET_ITEM(item->holder, i) != PyTuple_GET_ITEM(item->seen, i))
            return 0;
    return 1;
}

/* A type without a version differs: who looks at it gives it one. */
static int is_same(const spot *item)
{
    if (PyList_Check(item->holder))
        return is_same_list(item);
    if (PyType_Check(item->holder))
        return item->version != 0 && item->version == version_of(item);
    return held_by(item) == item->seen && extra_of(item) == item->extra;
}

static int take(spot *item)
{
    PyObject *seen = NULL;
    if (PyList_Check(item->holder)) {
        seen = PyList_AsTuple(item->holder);
        if (seen == NULL)
            return -1;
    } else {
        seen = held_by(item);
        Py_XINCREF(seen);
    }
    PyObject *extra = extra_of(item);
    Py_XINCREF(extra);
    item->version = version_of(item);
    PyObject *before = item->seen;
    PyObject *before_extra = item->extra;
    item->seen = seen;
    item->extra = extra;
    Py_XDECREF(before); /* may run code of its own */
    Py_XDECREF(before_extra);
    return 0;
}

static int begin(spot *item, PyObject *what)
{
    if (PyTuple_Check(what)) {
        PyObject *dict, *name;
        if (!PyArg_ParseTuple(what, "O!U", &PyDict_Type, &dict, &name))
            return -1;
        item->holder = Py_NewRef(dict);
        item->name = Py_NewRef(name);
    } else if (PyCell_Check(what) || PyFunction_Check(what) || PyType_Check(what) ||
               PyList_Check(what)) {
        item->holder = Py_NewRef(what);
    } else {
        PyErr_Format(PyExc_TypeError,
                     "a spot is %R: give (dict, name), a cell, a function, a class or "
                     "a list",
                     what);
        return -1;
    }
    return take(item);
}

static PyObject *spots_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"places", NULL};
    const module_state *state = state_of_type(type);
    PyObject *places;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Spots", names, &PyList_Type,
                                     &places))
        return NULL;
    spots_object *self = (spots_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    const Py_ssize_t n = PyList_GET_SIZE(places);
    if (pli_check(state, pli_calloc((size_t)n + 1, sizeof *self->items,
                                    "spots to watch", &self->items)) != 0)
        goto fail;
    while (self->n_items < n) {
        spot *item =
            &self->items[self->n_items++]; /* a half-taken one is dropped too */
        if (begin(item, PyList_GET_ITEM(places, self->n_items - 1)) != 0)
            goto fail;
    }
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

/* Calls nothing of Python's, so nothing changes under the loop. */
static PyObject *spots_differing(PyObject *object, PyObject *ignored)
{
    const spots_object *self = (spots_object *)object;
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

static PyObject *spots_accept(PyObject *object, PyObject *ignored)
{
    const spots_object *self = (spots_object *)object;
    (void)ignored;
    for (Py_ssize_t i = 0; i < self->n_items; i++)
        if (!is_same(&self->items[i]) && take(&self->items[i]) != 0)
            return NULL;
    Py_RETURN_NONE;
}

/* ---- life ----------------------------------------------------------------------- */

static int spots_traverse(PyObject *object, visitproc visit, void *arg)
{
    const spots_object *self = (spots_object *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        Py_VISIT(self->items[i].holder);
        Py_VISIT(self->items[i].seen);
        Py_VISIT(self->items[i].extra);
    }
    return 0;
}

static int spots_clear(PyObject *object)
{
    spots_object *self = (spots_object *)object;
    const Py_ssize_t n = self->n_items;
    self->n_items = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_CLEAR(self->items[i].holder);
        Py_CLEAR(self->items[i].name);
        Py_CLEAR(self->items[i].seen);
        Py_CLEAR(self->items[i].extra);
    }
    return 0;
}

static void spots_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)spots_clear(object);
    pli_free(((spots_object *)object)->items);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef spots_methods[] = {
    {"differing", spots_differing, METH_NOARGS,
     "differing($self, /)\n--\n\nReturn the indices of the spots that differ from what "
     "was last accepted."},
    {"accept", spots_accept, METH_NOARGS,
     "accept($self, /)\n--\n\nTake every spot as it is now."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot spots_slots[] = {
    {Py_tp_new, spots_new},
    {Py_tp_dealloc, spots_dealloc},
    {Py_tp_traverse, spots_traverse},
    {Py_tp_clear, spots_clear},
    {Py_tp_methods, spots_methods},
    {Py_tp_doc,
     "Spots(places)\n--\n\nEntries of dictionaries, cells, functions, classes "
     "and lists, compared by identity."},
    {0, NULL},
};

PyType_Spec pli_spots_spec = {
    .name = "paceline._native.Spots",
    .basicsize = sizeof(spots_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = spots_slots,
};
