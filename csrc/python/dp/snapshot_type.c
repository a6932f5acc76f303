/* snapshot_type.c - paceline._native.Snapshot: what has changed since last?
 *
 * A module is its dictionaries (attributes, parameters, children, hooks), what its
 * attributes hold, and the code and the globals that its forward reads.  A snapshot
 * records each object as it was (snapshot_item.c), so that every forward can ask.  What
 * a difference means is for its caller to say.
 */
#include "snapshot.h"

typedef struct snapshot_object {
    PyObject_HEAD
    pli_watched *items;
    Py_ssize_t n_items;
    Py_ssize_t n_allocated;
    Py_ssize_t n_free; /* of the items: nothing is watched there */
    int is_walking;    /* code of a member's own must not move the items */
} snapshot_object;

static PyObject *snapshot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Snapshot", names))
        return NULL;
    return type->tp_alloc(type, 0);
}

static int check_idle(const snapshot_object *self)
{
    if (!self->is_walking)
        return 0;
    PyErr_SetString(PyExc_RuntimeError,
                    "this snapshot is being compared: code of a watched object "
                    "must not change it");
    return -1;
}

/* ---- what is watched ------------------------------------------------------------ */

/* The index of an item where nothing is watched, or -1 with an exception. */
static Py_ssize_t find_free(snapshot_object *self)
{
    if (self->n_free > 0)
        for (Py_ssize_t i = 0; i < self->n_items; i++)
            if (self->items[i].live == NULL)
                return i;
    if (self->n_items == self->n_allocated) {
        const Py_ssize_t n = 2 * self->n_allocated + 16;
        pli_watched *items =
            PyMem_Realloc(self->items, (size_t)n * sizeof *self->items);
        if (items == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->items = items;
        self->n_allocated = n;
    }
    self->items[self->n_items] = (pli_watched){.live = NULL};
    self->n_free++;
    return self->n_items++;
}

static PyObject *snapshot_add(PyObject *object, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(object);
    static char *names[] = {"", "owner", "whole", NULL};
    snapshot_object *self = (snapshot_object *)object;
    PyObject *live, *owner = NULL;
    int is_whole = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O$p:add", names, &live, &owner,
                                     &is_whole) ||
        check_idle(self) != 0)
        return NULL;
    pli_watched item;
    Py_ssize_t at = -1;
    owner = owner == Py_None ? NULL : owner;
    if (pli_watched_init(state_of(object), live, owner, is_whole, &item) == 0)
        at = find_free(self);
    if (at < 0) {
        pli_watched_drop(&item);
        return NULL;
    }
    self->items[at] = item;
    self->n_free--;
    return PyLong_FromSsize_t(at);
}

/* The item of an index, or NULL with an exception. */
static pli_watched *item_at(snapshot_object *self, PyObject *index)
{
    const Py_ssize_t i = PyLong_AsSsize_t(index);
    if ((i == -1 && PyErr_Occurred()) || check_idle(self) != 0)
        return NULL;
    if (i >= 0 && i < self->n_items && self->items[i].live != NULL)
        return &self->items[i];
    PyErr_Format(PyExc_IndexError, "index is %zd: this snapshot has %zd items, or had",
                 i, self->n_items);
    return NULL;
}

static PyObject *snapshot_drop(PyObject *object, PyObject *index)
{
    PLI_ENTER(object);
    snapshot_object *self = (snapshot_object *)object;
    pli_watched *item = item_at(self, index);
    if (item == NULL)
        return NULL;
    pli_watched gone = *item;
    *item = (pli_watched){.live = NULL};
    self->n_free++;
    pli_watched_drop(&gone); /* may run code of the members' own */
    Py_RETURN_NONE;
}

/* ---- comparing ------------------------------------------------------------------ */

static PyObject *snapshot_differing(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    snapshot_object *self = (snapshot_object *)object;
    const module_state *state = state_of(object);
    PyObject *found = NULL;
    int status = check_idle(self);
    (void)ignored;
    if (status != 0)
        return NULL;
    self->is_walking = 1;
    for (Py_ssize_t i = 0; status == 0 && i < self->n_items; i++) {
        if (self->items[i].live == NULL || pli_watched_is_same(state, &self->items[i]))
            continue;
        if (found == NULL)
            found = PyList_New(0);
        PyObject *index = found != NULL ? PyLong_FromSsize_t(i) : NULL;
        status = index != NULL ? PyList_Append(found, index) : -1;
        Py_XDECREF(index);
    }
    self->is_walking = 0;
    if (status != 0)
        Py_CLEAR(found);
    return status != 0 || found != NULL ? found : PyTuple_New(0);
}

static PyObject *snapshot_delta(PyObject *object, PyObject *index)
{
    PLI_ENTER(object);
    snapshot_object *self = (snapshot_object *)object;
    pli_watched *item = item_at(self, index);
    if (item == NULL)
        return NULL;
    self->is_walking = 1;
    PyObject *delta = pli_watched_delta(item);
    self->is_walking = 0;
    return delta;
}

static PyObject *snapshot_accept(PyObject *object, PyObject *index)
{
    PLI_ENTER(object);
    snapshot_object *self = (snapshot_object *)object;
    pli_watched *item = item_at(self, index);
    if (item == NULL)
        return NULL;
    pli_watched fresh;
    PyObject *owner = item->owner;
    self->is_walking = 1;
    const int status =
        pli_watched_init(state_of(object), item->live, owner, item->is_whole, &fresh);
    self->is_walking = 0;
    if (status == 0) {
        const pli_watched before = *item;
        *item = fresh;
        fresh = before;
    }
    pli_watched_drop(&fresh); /* may run code of the members' own */
    if (status != 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- life ----------------------------------------------------------------------- */

static int snapshot_traverse(PyObject *object, visitproc visit, void *arg)
{
    const snapshot_object *self = (snapshot_object *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        const int status = pli_watched_visit(&self->items[i], visit, arg);
        if (status != 0)
            return status;
    }
    return 0;
}

static int snapshot_clear(PyObject *object)
{
    snapshot_object *self = (snapshot_object *)object;
    pli_watched *items = self->items;
    const Py_ssize_t n = self->n_items;
    self->items = NULL;
    self->n_items = self->n_allocated = self->n_free = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        pli_watched_drop(&items[i]);
    PyMem_Free(items);
    return 0;
}

static void snapshot_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    (void)snapshot_clear(object);
    pli_object_free(object);
}

static PyMethodDef snapshot_methods[] = {
    {"add", (PyCFunction)(void (*)(void))snapshot_add, METH_VARARGS | METH_KEYWORDS,
     "add($self, live, /, owner=None, *, whole=False)\n--\n\nWatch one more object; "
     "return its index.  The type of `owner` counts as part of it; a string: watch "
     "that entry of the dictionary alone.  `whole`: hash all bytes of a tensor, "
     "however many."},
    {"drop", snapshot_drop, METH_O,
     "drop($self, index, /)\n--\n\nWatch an object no longer; its index may serve "
     "another."},
    {"differing", snapshot_differing, METH_NOARGS,
     "differing($self, /)\n--\n\nReturn the indices of the objects that differ from "
     "what was last accepted."},
    {"delta", snapshot_delta, METH_O,
     "delta($self, index, /)\n--\n\nReturn the entries of a dictionary that differ: "
     "as they were, and as they are."},
    {"accept", snapshot_accept, METH_O,
     "accept($self, index, /)\n--\n\nTake an object as it is now."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot snapshot_slots[] = {
    {Py_tp_new, snapshot_new},
    {Py_tp_dealloc, snapshot_dealloc},
    {Py_tp_traverse, snapshot_traverse},
    {Py_tp_clear, snapshot_clear},
    {Py_tp_methods, snapshot_methods},
    {Py_tp_doc, "Snapshot()\n--\n\nDictionaries, lists, sets, functions, classes, "
                "cells, tensors and arrays: which have changed?"},
    {0, NULL},
};

PyType_Spec pli_snapshot_spec = {
    .name = "paceline._native.Snapshot",
    .basicsize = sizeof(snapshot_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = snapshot_slots,
};
