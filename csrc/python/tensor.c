/* tensor.c - reads and makes tensors by DLPack. */
#include "tensor.h"

#include <string.h>

#include "core/alloc.h"

/* ---- reading -------------------------------------------------------------------- */

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
        {DL_COMPLEX, 32, PL_I32}, /* it is only moved: nothing adds integers */
    };
    for (size_t i = 0; dtype.lanes == 1 && i < sizeof table / sizeof table[0]; i++) {
        if (table[i].code != dtype.code || table[i].bits != dtype.bits)
            continue;
        *out = table[i].dtype;
        return 0;
    }
    return -1;
}

/* A device as text: "the CPU", "cuda:1". */
typedef struct place_text {
    char text[48];
} place_text;

static place_text place_in_words(dl_device place)
{
    place_text out;
    if (place.type == DL_CPU)
        (void)PyOS_snprintf(out.text, sizeof out.text, "the CPU");
    else if (place.type == DL_CUDA)
        (void)PyOS_snprintf(out.text, sizeof out.text, "cuda:%d", (int)place.id);
    else
        (void)PyOS_snprintf(out.text, sizeof out.text, "a device of DLPack's type %d",
                            (int)place.type);
    return out;
}

static int is_on(const dl_tensor *dl, dl_device place)
{
    return dl->device.type == place.type &&
           (place.type == DL_CPU || dl->device.id == place.id);
}

static int refuse_place(const dl_tensor *dl, dl_device place, const char *what)
{
    if (place.type == DL_CPU)
        return pli_error(
            PyExc_NotImplementedError,
            "%s is not in CPU memory (DLPack device type %d): paceline needs it there",
            what, (int)dl->device.type);
    return pli_error(
        PyExc_ValueError,
        "%s is on %s, and the model's first parameter was on %s when it was "
        "wrapped: have all of the model on one device, and wrap it there",
        what, place_in_words(dl->device).text, place_in_words(place).text);
}

static int fill(const dl_tensor *dl, dl_device place, const char *what, pli_tensor *out)
{
    pli_layout *layout = &out->layout;
    if (!is_on(dl, place))
        return refuse_place(dl, place, what);
    if (dl->ndim > PLI_MAX_DIMS || read_dtype(dl->dtype, &layout->dtype) != 0)
        return pli_error(
            PyExc_NotImplementedError,
            "%s has a type that paceline cannot reduce (DLPack type code %d, %d "
            "bits)",
            what, dl->dtype.code, dl->dtype.bits);
    layout->n_dims = dl->ndim;
    layout->n_elems = 1;
    for (int d = dl->ndim - 1; d >= 0; d--) {
        layout->dims[d].size = dl->shape[d];
        layout->dims[d].stride =
            dl->strides != NULL ? dl->strides[d] : (int64_t)layout->n_elems;
        layout->n_elems *= (size_t)dl->shape[d];
    }
    layout->is_lazy = dl->data == NULL && layout->n_elems > 0;
    out->data = dl->data != NULL ? (char *)dl->data + dl->byte_offset : NULL;
    return 0;
}

/* Replaces torch's exception by one that names what was refused, and why. */
static int refuse(const char *what)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    /* The first line is enough: a C++ stack follows it. */
    PyObject *text = value != NULL ? PyObject_Str(value) : NULL;
    PyObject *lines = text != NULL ? PyUnicode_Splitlines(text, 0) : NULL;
    PyErr_Format(PyExc_TypeError, "%s is not a strided tensor in memory: %S", what,
                 lines != NULL && PyList_GET_SIZE(lines) > 0 ? PyList_GET_ITEM(lines, 0)
                                                             : Py_None);
    Py_XDECREF(lines);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

/* torch before 2.9 exports dimensions of size 1 with stride 1, but its own operations
 * use the tensor's stride. */
static int restore_strides(PyObject *tensor, dl_tensor *dl)
{
    int n_single = 0;
    for (int d = 0; d < dl->ndim; d++)
        n_single += dl->shape[d] < 2;
    if (n_single == 0 || dl->strides == NULL)
        return 0;
    PyObject *strides = PyObject_CallMethod(tensor, "stride", NULL);
    int status = strides != NULL && PyTuple_GET_SIZE(strides) == dl->ndim ? 0 : -1;
    for (int d = 0; status == 0 && d < dl->ndim; d++) {
        dl->strides[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, d));
        status = dl->strides[d] == -1 && PyErr_Occurred() ? -1 : 0;
    }
    Py_XDECREF(strides);
    return status;
}

/* *capsule: the caller keeps it while it reads *out, then drops it; it may be NULL. */
static int read_dl(const module_state *state, PyObject *object, const char *what,
                   dl_tensor *out, PyObject **capsule)
{
    *capsule = NULL;
    if (state->exchange != NULL)
        return state->exchange->tensor_from_object(object, out) == 0 ? 0 : refuse(what);
    PyObject *detached = PyObject_CallMethod(object, "detach", NULL);
    /* torch's __dlpack__() requires that the tensor's device is the current one. */
    if (detached != NULL)
        *capsule = PyObject_CallOneArg(state->to_dlpack, detached);
    dl_managed *managed =
        *capsule != NULL ? PyCapsule_GetPointer(*capsule, "dltensor") : NULL;
    const int has_strides =
        managed != NULL && restore_strides(detached, &managed->tensor) == 0;
    Py_XDECREF(detached);
    if (!has_strides) {
        Py_CLEAR(*capsule);
        return refuse(what);
    }
    *out = managed->tensor;
    return 0;
}

/* Complex tensors have a bit for lazy conjugation; the imaginary part of such a tensor
 * has one for a lazy sign.  With more than one element that part has gaps in memory, so
 * no code treats it as a dense block.  pli_tensor_read_grad() has the exception. */
static int is_complex(const pli_layout *layout)
{
    return layout->dtype == PL_C64 || layout->dtype == PL_C128;
}

static int may_be_lazy(const pli_layout *layout)
{
    const int is_real =
        layout->dtype == PL_F32 || layout->dtype == PL_F64 || layout->dtype == PL_F16;
    return is_complex(layout) || (is_real && layout->n_elems == 1);
}

static int read_lazy(const module_state *state, PyObject *object, int may_be_conj,
                     pli_layout *layout)
{
    const int is_neg =
        pli_is_true(PyObject_CallMethodNoArgs(object, state->name_is_neg));
    const int is_conj =
        is_neg == 0 && may_be_conj
            ? pli_is_true(PyObject_CallMethodNoArgs(object, state->name_is_conj))
            : 0;
    layout->is_lazy |= is_neg == 1 || is_conj == 1;
    return is_neg < 0 || is_conj < 0 ? -1 : 0;
}

int pli_tensor_read_any(const module_state *state, dl_device place, PyObject *object,
                        const char *what, pli_tensor *out)
{
    dl_tensor dl;
    PyObject *capsule;
    if (read_dl(state, object, what, &dl, &capsule) != 0)
        return -1;
    const int is_bits = dl.dtype.code == DL_COMPLEX && dl.dtype.bits == 32;
    int status = fill(&dl, place, what, out);
    Py_XDECREF(capsule);
    if (status == 0 && (is_bits || may_be_lazy(&out->layout)))
        status =
            read_lazy(state, object, is_bits || is_complex(&out->layout), &out->layout);
    /* A copy by torch would convert the integers to numbers. */
    if (status == 0 && is_bits &&
        (out->layout.is_lazy || !pli_layout_is_dense(&out->layout)))
        return pli_error(PyExc_NotImplementedError,
                         "%s is a view of complex32: give a contiguous copy", what);
    return status;
}

int pli_tensor_read_grad(const module_state *state, dl_device place, PyObject *object,
                         const char *what, pli_tensor *out)
{
    const int status = pli_tensor_read_any(state, place, object, what, out);
    if (status != 0 || may_be_lazy(&out->layout) ||
        (PyObject *)Py_TYPE(object) != state->tensor_type)
        return status;
    return read_lazy(state, object, 0, &out->layout);
}

int pli_tensor_read_on(const module_state *state, dl_device place, PyObject *object,
                       const char *what, pli_tensor *out)
{
    if (pli_tensor_read_any(state, place, object, what, out) != 0)
        return -1;
    if (out->data != NULL || out->layout.n_elems == 0)
        return 0;
    return pli_error(PyExc_TypeError, "%s is a %s: give a tensor with memory", what,
                     Py_TYPE(object)->tp_name);
}

int pli_tensor_read(const module_state *state, PyObject *object, const char *what,
                    pli_tensor *out)
{
    const dl_device cpu = {.type = DL_CPU};
    return pli_tensor_read_on(state, cpu, object, what, out);
}

int pli_tensor_place(const module_state *state, PyObject *object, const char *what,
                     dl_device *out)
{
    dl_tensor dl;
    PyObject *capsule;
    if (read_dl(state, object, what, &dl, &capsule) != 0)
        return -1;
    *out = dl.device;
    Py_XDECREF(capsule);
    return 0;
}

/* ---- making --------------------------------------------------------------------- */

/* A tensor over our memory: both of DLPack's forms, followed by its dimensions. */
typedef struct export {
    dl_managed_versioned versioned;
    dl_managed plain;
    pli_window *window; /* NULL: the tensor is not counted */
    size_t slot;
    int64_t dims[]; /* shape, then strides */
} export;

static void drop_export(export *self)
{
    if (self->window != NULL)
        pli_window_unsee(self->window, self->slot);
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

/* An export with room for n_dims dimensions, which the caller fills in. */
static export *make_export(const module_state *state, int n_dims)
{
    export *self = NULL;
    const size_t dims_bytes = 2 * (size_t)n_dims * sizeof(int64_t);
    const pl_status st = pli_calloc(1, sizeof *self + dims_bytes, "a view", &self);
    if (st != PL_OK)
        pli_raise(state, st);
    return self;
}

/* Fills in both forms and gives the export to torch, which then owns it. */
static PyObject *finish(const module_state *state, export *self, const dl_tensor *like)
{
    dl_tensor tensor = *like;
    tensor.shape = self->dims;
    tensor.strides = self->dims + like->ndim;
    tensor.byte_offset = 0;
    self->versioned = (dl_managed_versioned){.version = {.major = DL_MAJOR},
                                             .context = self,
                                             .deleter = delete_versioned,
                                             .tensor = tensor};
    self->plain =
        (dl_managed){.tensor = tensor, .context = self, .deleter = delete_plain};
    return import(state, self);
}

static PyObject *make(const module_state *state, const pli_view *view, void *data,
                      const pli_layout *layout)
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
    self->slot = view->slot;
    self->window = view->window;
    if (view->window != NULL)
        pli_window_see(view->window, view->slot);
    const dl_tensor like = {.data = data,
                            .device = {.type = DL_CPU},
                            .ndim = layout->n_dims,
                            .dtype = dtypes[layout->dtype]};
    return finish(state, self, &like);
}

PyObject *pli_tensor_view(const module_state *state, const pli_view *view,
                          const pli_layout *layout)
{
    return make(state, view, view->window->base + view->offset, layout);
}

PyObject *pli_tensor_borrow(const module_state *state, void *data,
                            const pli_layout *layout)
{
    const pli_view none = {.window = NULL};
    return make(state, &none, data, layout);
}

int pli_increment_versions(const module_state *state, PyObject *tensors)
{
    PyObject *result = PyObject_CallOneArg(state->increment_version, tensors);
    if (result != NULL && PyIter_Check(result)) /* a map() of calls, one per tensor */
        Py_SETREF(result, PySequence_Tuple(result));
    return pli_drop(result);
}

int pli_tensor_overwrite(PyObject *to, PyObject *from)
{
    PyObject *target = PyObject_CallMethod(to, "detach", NULL);
    PyObject *source =
        target != NULL ? PyObject_CallMethod(from, "detach", NULL) : NULL;
    PyObject *result =
        source != NULL ? PyObject_CallMethod(target, "copy_", "O", source) : NULL;
    Py_XDECREF(target);
    Py_XDECREF(source);
    return pli_drop(result);
}

long pli_tensor_version(PyObject *tensor)
{
    PyObject *version = PyObject_GetAttrString(tensor, "_version");
    const long number = version != NULL ? PyLong_AsLong(version) : -1;
    Py_XDECREF(version);
    return number;
}
