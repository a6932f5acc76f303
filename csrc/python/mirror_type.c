/* mirror_type.c - paceline._native.Mirror: what has changed since last?
 *
 * A module is its dictionaries: attributes, parameters, children, hooks; and what its
 * attributes hold.  A mirror remembers each as it was (mirror_item.c), so that every
 * forward can ask.  What a difference means is for its caller to say, who looks at the
 * live thing and at the difference.
 */
#include "mirror.h"

typedef struct mirror_object {
    PyObject_HEAD
    pli_mirrored *items;
    Py_ssize_t n_items;
    Py_ssize_t n_room;
    Py_ssize_t n_free; /* of the items: nothing is mirrored there */
} mirror_object;

/* ---- what is mirrored -------------------------------------------------------------
 */

/* The index of an item where nothing is mirrored, or -1 with an exception. */
static Py_ssize_t find_free(mirror_object *self)
{
    if (self->n_free > 0)
        for (Py_ssize_t i = 0; i < self->n_items; i++)
            if (self->items[i].live == NULL)
                return i;
    if (self->n_items == self->n_room) {
        const Py_ssize_t n = 2 * self->n_room + 16;
        pli_mirrored *items =
            PyMem_Realloc(self->items, (size_t)n * sizeof *self->items);
        if (items == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->items = items;
        self->n_room = n;
    }
    self->items[self->n_items] = (pli_mirrored){.live = NULL};
    self->n_free++;
    return self->n_items++;
}

static Py_ssize_t add(mirror_object *self, PyObject *live, PyObject *owner)
{
    pli_mirrored item;
    if (pli_mirrored_init(state_of((PyObject *)self), live, owner, &item) != 0) {
        pli_mirrored_drop(&item);
        return -1;
    }
    const Py_ssize_t at = find_free(self);
    if (at < 0) {
        pli_mirrored_drop(&item);
        return -1;
    }
    self->items[at] = item;
    self->n_free--;
    return at;
}

static PyObject *mirror_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"things", NULL};
    PyObject *things;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Mirror", names, &PyList_Type,
                                     &things))
        return NULL;
    mirror_object *self = (mirror_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(things); i++)
        if (add(self, PyList_GET_ITEM(things, i), NULL) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    return (PyObject *)self;
}

static PyObject *mirror_add(PyObject *object, PyObject *args)
{
    PyObject *live, *owner = NULL;
    if (!PyArg_ParseTuple(args, "O|O:add", &live, &owner))
        return NULL;
    const Py_ssize_t at = add((mirror_object *)object, live, owner);
    return at < 0 ? NULL : PyLong_FromSsize_t(at);
}

/* The item of an index, or NULL with an exception. */
static pli_mirrored *item_at(mirror_object *self, PyObject *index)
{
    const Py_ssize_t i = PyLong_AsSsize_t(index);
    if (i == -1 && PyErr_Occurred())
        return NULL;
    if (i >= 0 && i < self->n_items && self->items[i].live != NULL)
        return &self->items[i];
    PyErr_Format(PyExc_IndexError, "index is %zd: this mirror has %zd things, or had",
                 i, self->n_items);
    return NULL;
}

static PyObject *mirror_drop(PyObject *object, PyObject *index)
{
    mirror_object *self = (mirror_object *)object;
    pli_mirrored *item = item_at(self, index);
    if (item == NULL)
        return NULL;
    pli_mirrored gone = *item;
    *item = (pli_mirrored){.live = NULL};
    self->n_free++;
    pli_mirrored_drop(&gone); /* may run code of the members' own */
    Py_RETURN_NONE;
}

/* ---- comparing ------------------------------------------------------------------ */

static PyObject *mirror_differing(PyObject *object, PyObject *ignored)
{
    const mirror_object *self = (mirror_object *)object;
    const module_state *state = state_of(object);
    PyObject *found = NULL;
    (void)ignored;
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        if (self->items[i].live == NULL || pli_mirrored_is_same(state, &self->items[i]))
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

static PyObject *mirror_live(PyObject *object, PyObject *index)
{
    const pli_mirrored *item = item_at((mirror_object *)object, index);
    return item != NULL ? Py_NewRef(item->live) : NULL;
}

static PyObject *mirror_owner(PyObject *object, PyObject *index)
{
    const pli_mirrored *item = item_at((mirror_object *)object, index);
    if (item == NULL)
        return NULL;
    return Py_NewRef(item->owner != NULL ? item->owner : Py_None);
}

static PyObject *mirror_delta(PyObject *object, PyObject *index)
{
    pli_mirrored *item = item_at((mirror_object *)object, index);
    return item != NULL ? pli_mirrored_delta(item) : NULL;
}

/* Code that the members run as they are dropped may ask this very mirror. */
static int accept_at(mirror_object *self, Py_ssize_t i)
{
    const module_state *state = state_of((PyObject *)self);
    pli_mirrored *item = &self->items[i];
    if (item->live == NULL || pli_mirrored_is_same(state, item))
        return 0;
    pli_mirrored fresh;
    const int status = item->kind == PLI_MIRROR_LIST
                           ? pli_mirrored_take(state, item)
                           : pli_mirrored_init(state, item->live, item->owner, &fresh);
    if (item->kind == PLI_MIRROR_LIST)
        return status;
    if (status == 0) {
        const pli_mirrored before = *item;
        *item = fresh;
        fresh = before;
    }
    pli_mirrored_drop(&fresh);
    return status;
}

static PyObject *mirror_accept(PyObject *object, PyObject *args)
{
    mirror_object *self = (mirror_object *)object;
    Py_ssize_t only = -1;
    if (!PyArg_ParseTuple(args, "|n:accept", &only))
        return NULL;
    const Py_ssize_t begin = only < 0 ? 0 : only;
    const Py_ssize_t end = only < 0 ? self->n_items : only + 1;
    for (Py_ssize_t i = begin; i < end && i < self->n_items; i++)
        if (accept_at(self, i) != 0)
            return NULL;
    Py_RETURN_NONE;
}

/* ---- life ----------------------------------------------------------------------- */

static int mirror_traverse(PyObject *object, visitproc visit, void *arg)
{
    const mirror_object *self = (mirror_object *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        const int status = pli_mirrored_visit(&self->items[i], visit, arg);
        if (status != 0)
            return status;
    }
    return 0;
}

static int mirror_clear(PyObject *object)
{
    mirror_object *self = (mirror_object *)object;
    pli_mirrored *items = self->items;
    const Py_ssize_t n = self->n_items;
    self->items = NULL;
    self->n_items = self->n_room = self->n_free = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        pli_mirrored_drop(&items[i]);
    PyMem_Free(items);
    return 0;
}

static void mirror_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)mirror_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef mirror_methods[] = {
    {"add", mirror_add, METH_VARARGS,
     "add($self, thing, owner=None, /)\n--\n\nMirror one more; return its index.  "
     "The type of `owner` counts as part of it."},
    {"drop", mirror_drop, METH_O,
     "drop($self, index, /)\n--\n\nMirror a thing no longer; its index may serve "
     "another."},
    {"differing", mirror_differing, METH_NOARGS,
     "differing($self, /)\n--\n\nReturn the indices of the things that differ from "
     "what was last accepted."},
    {"live", mirror_live, METH_O, "live($self, index, /)\n--\n\nReturn a thing."},
    {"owner", mirror_owner, METH_O,
     "owner($self, index, /)\n--\n\nReturn whose attributes a thing is, or None."},
    {"delta", mirror_delta, METH_O,
     "delta($self, index, /)\n--\n\nReturn where members differ, what was there, and "
     "what is there now."},
    {"accept", mirror_accept, METH_VARARGS,
     "accept($self, index=-1, /)\n--\n\nTake a thing, or all, as it is now."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot mirror_slots[] = {
    {Py_tp_new, mirror_new},
    {Py_tp_dealloc, mirror_dealloc},
    {Py_tp_traverse, mirror_traverse},
    {Py_tp_clear, mirror_clear},
    {Py_tp_methods, mirror_methods},
    {Py_tp_doc, "Mirror(things)\n--\n\nDictionaries, lists, sets, deques, tensors and "
                "arrays: which have changed?"},
    {0, NULL},
};

PyType_Spec pli_mirror_spec = {
    .name = "paceline._native.Mirror",
    .basicsize = sizeof(mirror_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = mirror_slots,
};
