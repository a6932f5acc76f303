/* shared_tensors_type.c - paceline._native.SharedTensors: tensors and the places where
 * they belong.
 *
 * Replicas share a model through places in shared memory.  A parameter *lies* in its
 * place, and moved() tells when it no longer does (it was converted, or its .data was
 * set).  A buffer lies elsewhere and is copied: save() writes the caller's buffers to
 * their places, restore() gives a replica's buffers those values.  Modules write
 * buffers behind autograd's version counters (batch norm does), so the bytes are
 * compared.
 */
#include "python/tensor.h"

#include "core/alloc.h"
#include "replicas/replicate.h"

typedef struct shared_tensor {
    PyObject *owner; /* dict; NULL: `tensor` itself is meant */
    PyObject *name;
    PyObject *tensor;
    PyObject *place; /* owns the memory that `at` is in */
    void *at;
    pli_layout *layout;
    dl_dtype dtype;   /* as the exchange table says it */
    Py_ssize_t first; /* the first item of this place */
    long version;     /* as of record_versions() */
} shared_tensor;

typedef struct shared_tensors_object {
    PyObject_HEAD
    shared_tensor *items;
    Py_ssize_t n_items;
    pl_backend *backend;
    pl_move *moves;           /* scratch, one an item */
    const PyGetSetDef *wants; /* torch's `requires_grad`; NULL: some type has its own */
    const PyGetSetDef *version; /* torch's `_version`, likewise */
} shared_tensors_object;

/* ---- construction --------------------------------------------------------------- */

static int read_item(const module_state *state, PyObject *what, PyObject *place,
                     shared_tensor *out)
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

static void find_first(shared_tensors_object *self, Py_ssize_t i)
{
    shared_tensor *item = &self->items[i];
    item->first = 0;
    while (self->items[item->first].at != item->at || item->layout->n_elems == 0) {
        if (item->first == i)
            break;
        item->first++;
    }
}

/* torch's own getter of an attribute, to be called without a look-up each time; NULL
 * where the type of some tensor has its own. */
static const PyGetSetDef *find_getter(const shared_tensors_object *self, PyObject *name)
{
    const module_state *state = state_of((PyObject *)self);
    PyObject *torch_getter =
        state->tensor_type != NULL ? PyObject_GetAttr(state->tensor_type, name) : NULL;
    int is_theirs =
        torch_getter != NULL && Py_IS_TYPE(torch_getter, &PyGetSetDescr_Type);
    for (Py_ssize_t i = 0; is_theirs && i < self->n_items; i++) {
        PyObject *tensor = self->items[i].tensor;
        PyObject *getter = PyObject_GetAttr((PyObject *)Py_TYPE(tensor), name);
        is_theirs = getter == torch_getter;
        Py_XDECREF(getter);
    }
    PyErr_Clear();
    /* It lives as long as the type, so for ever. */
    const PyGetSetDef *found =
        is_theirs ? ((PyGetSetDescrObject *)torch_getter)->d_getset : NULL;
    Py_XDECREF(torch_getter);
    return found;
}

static PyObject *get_by(const PyGetSetDef *getter, PyObject *tensor, PyObject *name)
{
    return getter != NULL ? getter->get(tensor, getter->closure)
                          : PyObject_GetAttr(tensor, name);
}

static PyObject *tensors_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"tensors", "places", NULL};
    const module_state *state = state_of_type(type);
    PyObject *tensors, *places;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!:SharedTensors", names,
                                     &PyList_Type, &tensors, &PyList_Type, &places))
        return NULL;
    const Py_ssize_t n = PyList_GET_SIZE(tensors);
    if (PyList_GET_SIZE(places) != n) {
        PyErr_Format(PyExc_ValueError, "%zd tensors and %zd places: give one each", n,
                     PyList_GET_SIZE(places));
        return NULL;
    }
    shared_tensors_object *self = (shared_tensors_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (pli_check(state, pli_calloc((size_t)n + 1, sizeof *self->items,
                                    "tensors in places", &self->items)) != 0 ||
        pli_check(state, pli_calloc((size_t)n + 1, sizeof *self->moves,
                                    "copies of tensors", &self->moves)) != 0 ||
        pli_check(state, pli_cpu_backend_create(&self->backend)) != 0)
        goto fail;
    for (Py_ssize_t i = 0; i < n; i++) {
        self->n_items = i + 1; /* a half-read one is dropped too */
        if (read_item(state, PyList_GET_ITEM(tensors, i), PyList_GET_ITEM(places, i),
                      &self->items[i]) != 0)
            goto fail;
        find_first(self, i);
    }
    self->wants = find_getter(self, state->str_requires_grad);
    self->version = find_getter(self, state->name__version);
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

/* Whether a tensor is a lazy conjugate, which its memory does not show. */
static int is_conj(const module_state *state, const shared_tensor *item,
                   PyObject *tensor)
{
    if (item->layout->dtype != PL_C64 && item->layout->dtype != PL_C128)
        return 0;
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, state->str_is_conj);
    PyErr_Clear();
    Py_XDECREF(answer);
    return answer != Py_False;
}

/* ---- parameters ----------------------------------------------------------------- */

/* Whether a tensor has the item's layout. */
static int is_laid_out(const dl_tensor *now, const shared_tensor *item)
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

static int is_in_place(const module_state *state, const shared_tensor *item)
{
    const pl_dtype dtype = item->layout->dtype;
    const int is_complex = dtype == PL_C64 || dtype == PL_C128; /* it may be lazy */
    if (state->exchange != NULL && !is_complex) {
        dl_tensor now;
        if (state->exchange->tensor_from_object(item->tensor, &now) != 0) {
            PyErr_Clear(); /* it is of another kind now: moved in any case */
            return 0;
        }
        const char *data = now.data;
        return now.device.type == DL_CPU &&
               (data == NULL ? NULL : data + now.byte_offset) == item->at &&
               is_laid_out(&now, item) && !is_conj(state, item, item->tensor);
    }
    pli_tensor now;
    if (pli_tensor_read(state, item->tensor, "a parameter", &now) != 0) {
        PyErr_Clear();
        return 0;
    }
    return now.data == item->at && pli_layout_equal(&now.layout, item->layout) &&
           !is_conj(state, item, item->tensor);
}

static PyObject *tensors_moved(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const shared_tensors_object *self = (shared_tensors_object *)object;
    const module_state *state = state_of(object);
    (void)ignored;
    for (Py_ssize_t i = 0; i < self->n_items; i++)
        if (!is_in_place(state, &self->items[i]))
            Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

static PyObject *tensors_trainable(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const shared_tensors_object *self = (shared_tensors_object *)object;
    PyObject *requires_grad = state_of(object)->str_requires_grad;
    PyObject *mask = PyBytes_FromStringAndSize(NULL, self->n_items);
    (void)ignored;
    for (Py_ssize_t i = 0; mask != NULL && i < self->n_items; i++) {
        const int wants =
            pli_is_true(get_by(self->wants, self->items[i].tensor, requires_grad));
        if (wants < 0)
            Py_CLEAR(mask);
        else
            PyBytes_AS_STRING(mask)[i] = (char)wants;
    }
    return mask;
}

/* ---- versions ------------------------------------------------------------------- */

/* The count of in-place writes; -1 where a tensor has none (inference tensors). */
static long version_of(const shared_tensors_object *self, Py_ssize_t i)
{
    const module_state *state = state_of((PyObject *)self);
    PyObject *tensor = self->items[i].tensor;
    PyObject *version = get_by(self->version, tensor, state->name__version);
    const long number = version != NULL ? PyLong_AsLong(version) : -1;
    Py_XDECREF(version);
    PyErr_Clear();
    return number;
}

static PyObject *tensors_record_versions(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    shared_tensors_object *self = (shared_tensors_object *)object;
    (void)ignored;
    for (Py_ssize_t i = 0; i < self->n_items; i++)
        self->items[i].version = version_of(self, i);
    Py_RETURN_NONE;
}

static PyObject *tensors_written(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    shared_tensors_object *self = (shared_tensors_object *)object;
    PyObject *found = PyList_New(0);
    (void)ignored;
    for (Py_ssize_t i = 0; found != NULL && i < self->n_items; i++) {
        if (version_of(self, i) == self->items[i].version)
            continue;
        PyObject *index = PyLong_FromSsize_t(i);
        if (index == NULL || PyList_Append(found, index) != 0)
            Py_CLEAR(found);
        Py_XDECREF(index);
    }
    return found;
}

/* ---- buffers -------------------------------------------------------------------- */

/* Whether a place has all that there is to a tensor that fits it.  To DLPack, and so
 * to layouts, truths are bytes. */
static int is_all(const shared_tensors_object *self, const shared_tensor *item,
                  PyObject *tensor)
{
    const module_state *state = state_of((PyObject *)self);
    PyObject *wants = get_by(self->wants, tensor, state->str_requires_grad);
    int is_it = wants == Py_False && !is_conj(state, item, tensor);
    Py_XDECREF(wants);
    if (is_it && item->layout->dtype == PL_U8) {
        PyObject *now = PyObject_GetAttr(tensor, state->name_dtype);
        PyObject *then = PyObject_GetAttr(item->place, state->name_dtype);
        is_it = now == then;
        Py_XDECREF(now);
        Py_XDECREF(then);
    }
    PyErr_Clear();
    return is_it;
}

/* The tensor that is a buffer now, read; 0 where it does not fit its place, -1 with an
 * exception. */
static int read_buffer(const shared_tensors_object *self, const shared_tensor *item,
                       PyObject **object, pli_tensor *out)
{
    const module_state *state = state_of((PyObject *)self);
    *object = item->tensor;
    if (item->owner != NULL)
        *object = PyDict_GetItemWithError(item->owner, item->name);
    if (*object == NULL || *object == Py_None)
        return PyErr_Occurred() != NULL ? -1 : 0;
    if (pli_tensor_read(state, *object, "a buffer", out) != 0) {
        PyErr_Clear();
        return 0;
    }
    return pli_layout_equal(&out->layout, item->layout) && is_all(self, item, *object);
}

static pl_move move_of(const shared_tensor *item, void *to, const void *from)
{
    return (pl_move){to, from, item->layout->dtype, item->layout->n_elems};
}

static PyObject *tensors_save(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const shared_tensors_object *self = (shared_tensors_object *)object;
    size_t n_moves = 0;
    (void)ignored;
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        const shared_tensor *item = &self->items[i];
        PyObject *tensor;
        pli_tensor read;
        const int fits = read_buffer(self, item, &tensor, &read);
        if (fits < 0)
            return NULL;
        if (!fits)
            Py_RETURN_FALSE;
        self->moves[n_moves++] = move_of(item, item->at, read.data);
    }
    if (pli_check(state_of(object),
                  pli_replicate(self->backend, self->moves, n_moves)) != 0)
        return NULL;
    Py_RETURN_TRUE;
}

/* Gives the item's tensor the values of its place: in it, or in a new one where graphs
 * may have saved it.  0 or -1. */
static int restore_one(shared_tensors_object *self, Py_ssize_t i, int is_saved)
{
    const module_state *state = state_of((PyObject *)self);
    shared_tensor *item = &self->items[i];
    pli_tensor read;
    if (item->first < i) { /* one tensor by two names stays one */
        Py_XSETREF(item->tensor, Py_NewRef(self->items[item->first].tensor));
        return 0;
    }
    if (pli_tensor_read(state, item->tensor, "a buffer", &read) != 0)
        return -1;
    pl_move move = move_of(item, read.data, item->at);
    if (!pli_replicate_is_due(&move))
        return 0;
    if (is_saved) {
        PyObject *fresh = PyObject_CallOneArg(state->empty_like, item->tensor);
        if (fresh == NULL || pli_tensor_read(state, fresh, "a buffer", &read) != 0) {
            Py_XDECREF(fresh);
            return -1;
        }
        Py_SETREF(item->tensor, fresh);
        move.to = read.data;
    }
    return pli_check(state, self->backend->ops->copy(self->backend, &move, 1, NULL));
}

static PyObject *tensors_restore(PyObject *object, PyObject *arg)
{
    PLI_ENTER(object);
    shared_tensors_object *self = (shared_tensors_object *)object;
    const int is_saved = PyObject_IsTrue(arg);
    if (is_saved < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        const shared_tensor *item = &self->items[i];
        if (restore_one(self, i, is_saved) != 0 ||
            (item->owner != NULL &&
             PyDict_SetItem(item->owner, item->name, item->tensor) != 0))
            return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- life ----------------------------------------------------------------------- */

static int tensors_traverse(PyObject *object, visitproc visit, void *arg)
{
    const shared_tensors_object *self = (shared_tensors_object *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        Py_VISIT(self->items[i].owner);
        Py_VISIT(self->items[i].tensor);
        Py_VISIT(self->items[i].place);
    }
    return 0;
}

static int tensors_clear(PyObject *object)
{
    shared_tensors_object *self = (shared_tensors_object *)object;
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

static void tensors_dealloc(PyObject *object)
{
    shared_tensors_object *self = (shared_tensors_object *)object;
    PyObject_GC_UnTrack(object);
    (void)tensors_clear(object);
    pli_free(self->items);
    pli_free(self->moves);
    pli_backend_destroy(self->backend);
    pli_object_free(object);
}

static PyMethodDef tensors_methods[] = {
    {"moved", tensors_moved, METH_NOARGS,
     "moved($self, /)\n--\n\nTell whether a tensor is no longer in its place."},
    {"trainable", tensors_trainable, METH_NOARGS,
     "trainable($self, /)\n--\n\nReturn a byte a tensor: whether it requires a "
     "gradient."},
    {"record_versions", tensors_record_versions, METH_NOARGS,
     "record_versions($self, /)\n--\n\nRecord how often each tensor was written in "
     "place."},
    {"written", tensors_written, METH_NOARGS,
     "written($self, /)\n--\n\nReturn the indices of the tensors that were written "
     "since."},
    {"save", tensors_save, METH_NOARGS,
     "save($self, /)\n--\n\nCopy tensors to their places; False where one does not "
     "fit."},
    {"restore", tensors_restore, METH_O,
     "restore($self, is_saved, /)\n--\n\nCopy the places' values to their tensors, new "
     "ones where graphs may have saved them, and put those back where they were."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tensors_slots[] = {
    {Py_tp_new, tensors_new},
    {Py_tp_dealloc, tensors_dealloc},
    {Py_tp_traverse, tensors_traverse},
    {Py_tp_clear, tensors_clear},
    {Py_tp_methods, tensors_methods},
    {Py_tp_doc,
     "SharedTensors(tensors, places)\n--\n\nTensors, or pairs of (dict, key), and "
     "views of the shared memory where they belong."},
    {0, NULL},
};

PyType_Spec pli_shared_tensors_spec = {
    .name = "paceline._native.SharedTensors",
    .basicsize = sizeof(shared_tensors_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tensors_slots,
};
