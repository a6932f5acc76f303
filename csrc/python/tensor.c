/* tensor.c - DLPack, in and out. */
#include "tensor.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "../core/alloc.h"

/* ---- reading ------------------------------------------------------------------- */

static int read_dtype(dl_dtype dtype, pl_dtype *out)
{
    static const struct {
        uint8_t code;
        uint8_t bits;
        pl_dtype dtype;
    } table[] = {
        {DL_FLOAT, 32, PL_F32},   {DL_BFLOAT, 16, PL_BF16},   {DL_FLOAT, 16, PL_F16},
        {DL_FLOAT, 64, PL_F64},   {DL_INT, 64, PL_I64},       {DL_INT, 32, PL_I32},
        {DL_INT, 16, PL_I16},     {DL_INT, 8, PL_I8},         {DL_UINT, 8, PL_U8},
        {DL_COMPLEX, 64, PL_C64}, {DL_COMPLEX, 128, PL_C128}, {DL_BOOL, 8, PL_U8},
    };
    for (size_t i = 0; dtype.lanes == 1 && i < sizeof table / sizeof table[0]; i++) {
        if (table[i].code != dtype.code || table[i].bits != dtype.bits)
            continue;
        *out = table[i].dtype;
        return 0;
    }
    return -1;
}

static int fill(const dl_tensor *dl, const char *what, pli_tensor *out)
{
    pli_layout *layout = &out->layout;
    if (dl->device.type != DL_CPU) {
        PyErr_Format(PyExc_NotImplementedError,
                     "%s is not in CPU memory (DLPack device type %d): this version of "
                     "paceline trains on CPUs",
                     what, (int)dl->device.type);
        return -1;
    }
    if (dl->ndim > PLI_MAX_DIMS || read_dtype(dl->dtype, &layout->dtype) != 0) {
        PyErr_Format(
            PyExc_NotImplementedError,
            "%s has a type that paceline cannot reduce (DLPack type code %d, %d "
            "bits)",
            what, dl->dtype.code, dl->dtype.bits);
        return -1;
    }
    layout->n_dims = dl->ndim;
    layout->n_elems = 1;
    for (int d = dl->ndim - 1; d >= 0; d--) {
        layout->dims[d].size = dl->shape[d];
        layout->dims[d].stride =
            dl->strides != NULL ? dl->strides[d] : (int64_t)layout->n_elems;
        layout->n_elems *= (size_t)dl->shape[d];
    }
    if (dl->data == NULL && layout->n_elems > 0) {
        PyErr_Format(PyExc_TypeError, "%s has no memory (a fake or meta tensor)", what);
        return -1;
    }
    out->data = dl->data != NULL ? (char *)dl->data + dl->byte_offset : NULL;
    return 0;
}

/* Says what was refused and why, in place of what torch raised. */
static int refuse(const char *what)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    /* torch's words go on with a C++ stack: the first line is enough. */
    PyObject *words = value != NULL ? PyObject_Str(value) : NULL;
    PyObject *lines = words != NULL ? PyUnicode_Splitlines(words, 0) : NULL;
    PyErr_Format(PyExc_TypeError, "%s is no strided tensor in memory: %S", what,
                 lines != NULL && PyList_GET_SIZE(lines) > 0 ? PyList_GET_ITEM(lines, 0)
                                                             : Py_None);
    Py_XDECREF(lines);
    Py_XDECREF(words);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

static int read_by_capsule(PyObject *object, const char *what, pli_tensor *out)
{
    const dl_managed *managed = NULL;
    PyObject *capsule = NULL;
    PyObject *detached = PyObject_CallMethod(object, "detach", NULL);
    if (detached != NULL)
        capsule = PyObject_CallMethod(detached, "__dlpack__", NULL);
    if (capsule != NULL)
        managed = PyCapsule_GetPointer(capsule, "dltensor");
    const int result =
        managed != NULL ? fill(&managed->tensor, what, out) : refuse(what);
    Py_XDECREF(capsule);
    Py_XDECREF(detached);
    return result;
}

int pli_tensor_read(const module_state *state, PyObject *object, const char *what,
                    pli_tensor *out)
{
    dl_tensor dl;
    if (state->exchange == NULL)
        return read_by_capsule(object, what, out);
    if (state->exchange->tensor_from_object(object, &dl) != 0)
        return refuse(what);
    return fill(&dl, what, out);
}

/* ---- layouts ------------------------------------------------------------------- */

int pli_layout_is_dense(const pli_layout *layout)
{
    /* Walk the dimensions from the smallest stride up: each must begin where the
     * block of the ones before ends. */
    unsigned char is_taken[PLI_MAX_DIMS] = {0};
    int64_t block = 1;
    for (int n = 0; n < layout->n_dims; n++) {
        int next = -1;
        for (int d = 0; d < layout->n_dims; d++) {
            if (is_taken[d] || layout->dims[d].size == 1)
                continue;
            if (next < 0 || layout->dims[d].stride < layout->dims[next].stride)
                next = d;
        }
        if (next < 0)
            break;
        if (layout->dims[next].stride != block && layout->n_elems > 0)
            return 0;
        block *= layout->dims[next].size;
        is_taken[next] = 1;
    }
    return 1;
}

void pli_layout_make_row_major(pli_layout *layout)
{
    int64_t stride = 1;
    for (int d = layout->n_dims - 1; d >= 0; d--) {
        layout->dims[d].stride = stride;
        stride *= layout->dims[d].size;
    }
}

pl_status pli_layout_copy(const pli_layout *layout, pli_layout **out)
{
    pl_status st = PL_OK;
    const size_t n_bytes =
        offsetof(pli_layout, dims) + (size_t)layout->n_dims * sizeof(pli_dim);
    PL_TRY(pli_calloc(1, n_bytes, "a tensor's layout", out));
    memcpy(*out, layout, n_bytes);
done:
    return st;
}

int pli_layout_equal(const pli_layout *left, const pli_layout *right)
{
    if (left->dtype != right->dtype || left->n_dims != right->n_dims)
        return 0;
    for (int d = 0; d < left->n_dims; d++)
        if (left->dims[d].size != right->dims[d].size ||
            (left->dims[d].stride != right->dims[d].stride && left->dims[d].size != 1))
            return 0;
    return 1;
}

/* ---- making -------------------------------------------------------------------- */

/* One tensor of our memory: both of DLPack's forms, and the dimensions behind. */
typedef struct export {
    dl_managed_versioned versioned;
    dl_managed plain;
    pli_window *window; /* NULL: nobody counts */
    size_t slot;
    pli_room *room; /* NULL: in none */
    int64_t dims[]; /* shape, then strides */
} export;

static void drop_export(export *self)
{
    if (self->window != NULL)
        pli_window_unsee(self->window, self->slot);
    pli_room_release(self->room);
    pli_free(self);
}

static void delete_versioned(dl_managed_versioned *managed)
{
    drop_export(managed->context);
}

static void delete_plain(dl_managed *managed)
{
    drop_export(managed->context);
}

static PyObject *import(const module_state *state, export *self)
{
    void *object = NULL;
    if (state->exchange != NULL) {
        if (state->exchange->managed_to_object(&self->versioned, &object) != 0)
            return NULL;
        return object;
    }
    PyObject *capsule = PyCapsule_New(&self->plain, "dltensor", NULL);
    if (capsule == NULL) {
        drop_export(self);
        return NULL;
    }
    object = PyObject_CallOneArg(state->from_dlpack, capsule);
    Py_DECREF(capsule);
    return object;
}

/* One with room for n_dims dimensions, which are the caller's to fill in. */
static export *make_export(const module_state *state, int n_dims)
{
    export *self = NULL;
    const size_t dims_bytes = 2 * (size_t)n_dims * sizeof(int64_t);
    const pl_status st = pli_calloc(1, sizeof *self + dims_bytes, "a view", &self);
    if (st != PL_OK)
        pli_raise(state, st);
    return self;
}

/* Hands the export over. */
static PyObject *finish(const module_state *state, export *self, void *data,
                        dl_dtype dtype, int n_dims)
{
    const dl_tensor tensor = {.data = data,
                              .device = {.type = DL_CPU},
                              .ndim = n_dims,
                              .dtype = dtype,
                              .shape = self->dims,
                              .strides = self->dims + n_dims};
    self->versioned = (dl_managed_versioned){.version = {.major = DL_MAJOR},
                                             .context = self,
                                             .deleter = delete_versioned,
                                             .tensor = tensor};
    self->plain =
        (dl_managed){.tensor = tensor, .context = self, .deleter = delete_plain};
    return import(state, self);
}

static PyObject *make(const module_state *state, pli_window *window, size_t slot,
                      void *data, const pli_layout *layout)
{
    static const dl_dtype dtypes[PL_N_DTYPES] = {
        [PL_U8] = {DL_UINT, 8, 1},        [PL_I8] = {DL_INT, 8, 1},
        [PL_I16] = {DL_INT, 16, 1},       [PL_I32] = {DL_INT, 32, 1},
        [PL_I64] = {DL_INT, 64, 1},       [PL_F16] = {DL_FLOAT, 16, 1},
        [PL_BF16] = {DL_BFLOAT, 16, 1},   [PL_F32] = {DL_FLOAT, 32, 1},
        [PL_F64] = {DL_FLOAT, 64, 1},     [PL_C64] = {DL_COMPLEX, 64, 1},
        [PL_C128] = {DL_COMPLEX, 128, 1},
    };
    export *self = make_export(state, layout->n_dims);
    if (self == NULL)
        return NULL;
    for (int d = 0; d < layout->n_dims; d++) {
        self->dims[d] = layout->dims[d].size;
        self->dims[layout->n_dims + d] = layout->dims[d].stride;
    }
    self->slot = slot;
    self->window = window;
    if (window != NULL)
        pli_window_see(window, slot);
    return finish(state, self, data, dtypes[layout->dtype], layout->n_dims);
}

PyObject *pli_tensor_in_room(const module_state *state, pli_room *room,
                             const dl_tensor *like)
{
    const size_t n_bytes = (size_t)like->ndim * sizeof(int64_t);
    export *self = make_export(state, like->ndim);
    if (self == NULL)
        return NULL;
    if (n_bytes > 0) {
        memcpy(self->dims, like->shape, n_bytes);
        memcpy(self->dims + like->ndim, like->strides, n_bytes);
    }
    pli_room_hold(room);
    self->room = room;
    return finish(state, self, like->data, like->dtype, like->ndim);
}

PyObject *pli_tensor_view(const module_state *state, pli_window *window, size_t slot,
                          size_t offset, const pli_layout *layout)
{
    return make(state, window, slot, window->base + offset, layout);
}

PyObject *pli_tensor_borrow(const module_state *state, void *data,
                            const pli_layout *layout)
{
    return make(state, NULL, 0, data, layout);
}
