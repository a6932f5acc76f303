/* placed_type.c - paceline._native.Placed: tensors and the places where they belong.
 *
 * Replicas share a model through places in shared memory.  A parameter *lies* in its
 * place, and moved() tells when it no longer does (it was converted, or its .data was
 * set).  A buffer lies elsewhere and is copied: save() writes the caller's buffers to
 * their places, restore() gives a replica's buffers those values.  Modules write
 * buffers behind autograd's version counters (batch norm does), so the bytes are
 * compared.
 */
#include "tensor.h"

#include <string.h>

#include "../core/alloc.h"

typedef struct placed_item {
    PyObject *owner; /* dict; NULL: `tensor` itself is meant */
    PyObject *name;
    PyObject *tensor;
    PyObject *place; /* owns the memory that `at` is in */
    void *at;
    pli_layout *layout;
    dl_dtype dtype;   /* as the exchange table says it */
    Py_ssize_t first; /* the first item of this place */
} placed_item;

typedef struct placed_object {
    PyObject_HEAD
    placed_item *items;
    Py_ssize_t n_items;
    const PyGetSetDef *wants; /* torch's `requires_grad`; NULL: some type has its own */
} placed_object;

/* ---- construction ------------------------------------------------------------- */

static int read_item(const module_state *state, PyObject *what, PyObject *place,
                     placed_item *out)
{
    pli_tensor read;
    if (PyTuple_Check(what)) {
        PyObject *owner, *name;
        if (!PyArg_ParseTuple(what, "O!U", &PyDict_Type, &owner, &name))
            return -1;
        PyObject *tensor = PyDict_GetItemWithError(owner, name);
        if (tensor == NULL) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_KeyError, "'%U' is not in its dict", name);
            return -1;
        }
        out->owner = Py_NewRef(owner);
        out->name = Py_NewRef(name);
        what = tensor;
    }
    out->tensor = Py_NewRef(what);
    out->place = Py_NewRef(place);
    if (pli_tensor_read(state, place, "a place", &read) != 0)
        return -1;
    out->at = read.data;
    dl_tensor dl = {.ndim = 0};
    if (state->exchange != NULL && state->exchange->tensor_from_object(place, &dl) != 0)
        return -1;
    out->dtype = dl.dtype;
    if (!pli_layout_is_dense(&read.layout)) {
        PyErr_SetString(PyExc_ValueError, "a place has holes or overlaps");
        return -1;
    }
    return pli_check(state, pli_layout_copy(&read.layout, &out->layout));
}

static void find_first(placed_object *self, Py_ssize_t i)
{
    placed_item *item = &self->items[i];
    item->first = 0;
    while (self->items[item->first].at != item->at || item->layout->n_elems == 0) {
        if (item->first == i)
            break;
        item->first++;
    }
}

/* Finds what answers `requires_grad`: to be called without a look-up each time. */
static void find_getter(placed_object *self)
{
    const module_state *state = state_of((PyObject *)self);
    PyObject *of_all =
        state->tensor_type != NULL
            ? PyObject_GetAttr(state->tensor_type, state->str_requires_grad)
            : NULL;
    int is_theirs = of_all != NULL && Py_IS_TYPE(of_all, &PyGetSetDescr_Type);
    for (Py_ssize_t i = 0; is_theirs && i < self->n_items; i++) {
        PyObject *tensor = self->items[i].tensor;
        PyObject *own =
            PyObject_GetAttr((PyObject *)Py_TYPE(tensor), state->str_requires_grad);
        is_theirs = own == of_all;
        Py_XDECREF(own);
    }
    PyErr_Clear();
    if (is_theirs) /* as long as the type lives, so for ever */
        self->wants = ((PyGetSetDescrObject *)of_all)->d_getset;
    Py_XDECREF(of_all);
}

static PyObject *placed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensors", "places", NULL};
    const module_state *state = state_of_type(type);
    PyObject *tensors, *places;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!:Placed", names, &PyList_Type,
                                     &tensors, &PyList_Type, &places))
        return NULL;
    const Py_ssize_t n = PyList_GET_SIZE(tensors);
    if (PyList_GET_SIZE(places) != n) {
        PyErr_Format(PyExc_ValueError, "%zd tensors and %zd places: give one each", n,
                     PyList_GET_SIZE(places));
        return NULL;
    }
    placed_object *self = (placed_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (pli_check(state, pli_calloc((size_t)n + 1, sizeof *self->items,
                                    "tensors in places", &self->items)) != 0)
        goto fail;
    for (Py_ssize_t i = 0; i < n; i++) {
        self->n_items = i + 1; /* a half-read one is dropped too */
        if (read_item(state, PyList_GET_ITEM(tensors, i), PyList_GET_ITEM(places, i),
                      &self->items[i]) != 0)
            goto fail;
        find_first(self, i);
    }
    find_getter(self);
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

/* ---- parameters ----------------------------------------------------------------- */

/* Whether a tensor has the item's layout. */
static int is_laid_out(const dl_tensor *now, const placed_item *item)
{
    const pli_layout *layout = item->layout;
    if (now->dtype.code != item->dtype.code || now->dtype.bits != item->dtype.bits ||
        now->ndim != layout->n_dims)
        return 0;
    for (int d = 0; d < layout->n_dims; d++)
        if (now->shape[d] != layout->dims[d].size ||
            (now->strides != NULL && now->strides[d] != layout->dims[d].stride &&
             now->shape[d] != 1))
            return 0;
    return 1;
}

static int is_in_place(const module_state *state, const placed_item *item)
{
    if (state->exchange != NULL) {
        dl_tensor now;
        if (state->exchange->tensor_from_object(item->tensor, &now) != 0) {
            PyErr_Clear(); /* it is of another kind now: moved in any case */
            return 0;
        }
        const char *data = now.data;
        return now.device.type == DL_CPU &&
               (data == NULL ? NULL : data + now.byte_offset) == item->at &&
               is_laid_out(&now, item);
    }
    pli_tensor now;
    if (pli_tensor_read(state, item->tensor, "a parameter", &now) != 0) {
        PyErr_Clear();
        return 0;
    }
    return now.data == item->at && pli_layout_equal(&now.layout, item->layout);
}

static PyObject *placed_moved(PyObject *object, PyObject *ignored)
{
    const placed_object *self = (placed_object *)object;
    const module_state *state = state_of(object);
    (void)ignored;
    for (Py_ssize_t i = 0; i < self->n_items; i++)
        if (!is_in_place(state, &self->items[i]))
            Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

/* 1 or 0, or -1. */
static int is_trainable(const placed_object *self, Py_ssize_t i)
{
    PyObject *tensor = self->items[i].tensor;
    PyObject *wants =
        self->wants != NULL
            ? self->wants->get(tensor, self->wants->closure)
            : PyObject_GetAttr(tensor, state_of((PyObject *)self)->str_requires_grad);
    Py_XDECREF(wants); /* True and False live on */
    return wants == NULL ? -1 : wants == Py_True;
}

static PyObject *placed_trainable(PyObject *object, PyObject *ignored)
{
    const placed_object *self = (placed_object *)object;
    PyObject *mask = PyBytes_FromStringAndSize(NULL, self->n_items);
    (void)ignored;
    for (Py_ssize_t i = 0; mask != NULL && i < self->n_items; i++) {
        const int wants = is_trainable(self, i);
        if (wants < 0)
            Py_CLEAR(mask);
        else
            PyBytes_AS_STRING(mask)[i] = (char)wants;
    }
    return mask;
}

static PyObject *placed_is_as(PyObject *object, PyObject *mask)
{
    const placed_object *self = (placed_object *)object;
    if (!PyBytes_Check(mask) || PyBytes_GET_SIZE(mask) != self->n_items)
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        const int wants = is_trainable(self, i);
        if (wants < 0)
            return NULL;
        if (wants != PyBytes_AS_STRING(mask)[i])
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* ---- buffers -------------------------------------------------------------------- */

/* The tensor that is a buffer now, read; 0 where it does not fit its place, -1 with an
 * exception. */
static int read_buffer(const module_state *state, const placed_item *item,
                       PyObject **object, pli_tensor *out)
{
    *object = item->tensor;
    if (item->owner != NULL)
        *object = PyDict_GetItemWithError(item->owner, item->name);
    if (*object == NULL || *object == Py_None)
        return PyErr_Occurred() != NULL ? -1 : 0;
    if (pli_tensor_read(state, *object, "a buffer", out) != 0) {
        PyErr_Clear();
        return 0;
    }
    return pli_layout_equal(&out->layout, item->layout);
}

static PyObject *placed_save(PyObject *object, PyObject *ignored)
{
    const placed_object *self = (placed_object *)object;
    const module_state *state = state_of(object);
    (void)ignored;
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        const placed_item *item = &self->items[i];
        PyObject *tensor;
        pli_tensor read;
        const int fits = read_buffer(state, item, &tensor, &read);
        if (fits < 0)
            return NULL;
        if (!fits)
            Py_RETURN_FALSE;
        const size_t n_bytes = pli_layout_bytes(item->layout);
        if (n_bytes > 0 && memcmp(item->at, read.data, n_bytes) != 0)
            memcpy(item->at, read.data, n_bytes);
    }
    Py_RETURN_TRUE;
}

/* A tensor of the item's own with the place's values; NULL with an exception. */
static PyObject *renew(const module_state *state, const placed_item *item)
{
    pli_tensor fresh;
    PyObject *tensor = PyObject_CallOneArg(state->empty_like, item->tensor);
    if (tensor != NULL && pli_tensor_read(state, tensor, "a buffer", &fresh) != 0)
        Py_CLEAR(tensor);
    if (tensor != NULL)
        memcpy(fresh.data, item->at, pli_layout_bytes(item->layout));
    return tensor;
}

/* Gives the item's tensor the values of its place: in it, or in a new one where graphs
 * may have saved it.  0 or -1. */
static int restore_one(placed_object *self, Py_ssize_t i, int is_saved)
{
    const module_state *state = state_of((PyObject *)self);
    placed_item *item = &self->items[i];
    pli_tensor read;
    if (item->first < i) { /* one tensor by two names stays one */
        Py_XSETREF(item->tensor, Py_NewRef(self->items[item->first].tensor));
        return 0;
    }
    if (pli_tensor_read(state, item->tensor, "a buffer", &read) != 0)
        return -1;
    const size_t n_bytes = pli_layout_bytes(item->layout);
    if (n_bytes == 0 || memcmp(read.data, item->at, n_bytes) == 0)
        return 0;
    if (!is_saved) {
        memcpy(read.data, item->at, n_bytes);
        return 0;
    }
    PyObject *fresh = renew(state, item);
    if (fresh == NULL)
        return -1;
    Py_SETREF(item->tensor, fresh);
    return 0;
}

static PyObject *placed_restore(PyObject *object, PyObject *arg)
{
    placed_object *self = (placed_object *)object;
    const int is_saved = PyObject_IsTrue(arg);
    if (is_saved < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        const placed_item *item = &self->items[i];
        if (restore_one(self, i, is_saved) != 0 ||
            (item->owner != NULL &&
             PyDict_SetItem(item->owner, item->name, item->tensor) != 0))
            return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- life ----------------------------------------------------------------------- */

static int placed_traverse(PyObject *object, visitproc visit, void *arg)
{
    const placed_object *self = (placed_object *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        Py_VISIT(self->items[i].owner);
        Py_VISIT(self->items[i].tensor);
        Py_VISIT(self->items[i].place);
    }
    return 0;
}

static int placed_clear(PyObject *object)
{
    placed_object *self = (placed_object *)object;
    const Py_ssize_t n = self->n_items;
    self->n_items = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_CLEAR(self->items[i].owner);
        Py_CLEAR(self->items[i].name);
        Py_CLEAR(self->items[i].tensor);
        Py_CLEAR(self->items[i].place);
        pli_free(self->items[i].layout);
        self->items[i].layout = NULL;
    }
    return 0;
}

static void placed_dealloc(PyObject *object)
{
    placed_object *self = (placed_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)placed_clear(object);
    pli_free(self->items);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef placed_methods[] = {
    {"moved", placed_moved, METH_NOARGS,
     "moved($self, /)\n--\n\nTell whether a tensor is no longer in its place."},
    {"trainable", placed_trainable, METH_NOARGS,
     "trainable($self, /)\n--\n\nReturn a byte a tensor: whether it requires a "
     "gradient."},
    {"is_trainable_as", placed_is_as, METH_O,
     "is_trainable_as($self, mask, /)\n--\n\nTell whether trainable() would be "
     "`mask`."},
    {"save", placed_save, METH_NOARGS,
     "save($self, /)\n--\n\nCopy tensors to their places; False where one does not "
     "fit."},
    {"restore", placed_restore, METH_O,
     "restore($self, is_saved, /)\n--\n\nCopy the places' values to their tensors, new "
     "ones where graphs may have saved them, and put those back where they were."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot placed_slots[] = {
    {Py_tp_new, placed_new},
    {Py_tp_dealloc, placed_dealloc},
    {Py_tp_traverse, placed_traverse},
    {Py_tp_clear, placed_clear},
    {Py_tp_methods, placed_methods},
    {Py_tp_doc, "Placed(tensors, places)\n--\n\nTensors, or pairs of (dict, key), and "
                "views of the shared memory where they belong."},
    {0, NULL},
};

PyType_Spec pli_placed_spec = {
    .name = "paceline._native.Placed",
    .basicsize = sizeof(placed_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = placed_slots,
};
